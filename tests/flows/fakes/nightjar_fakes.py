"""Tiny stages in a real child process, for tests of the orchestration: `python -m nightjar_fakes STAGE DIRECTORY`.

What a stage does is told by `params["behaviour"]` of its spec (tests of the launcher) or by the environment variable
NIGHTJAR_FAKE, `stage=behaviour,...` (tests of the whole night).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from training.context import StageContext, StageOutcome
from training.errors import NightjarError, StageError
from training.process import die_with_parent, run_stage, watch_lease


def behaviour_of(context: StageContext) -> str:
    told = dict(item.split("=") for item in os.environ.get("NIGHTJAR_FAKE", "").split(",") if item)
    return str(context.spec.params.get("behaviour") or told.get(context.spec.stage, "ok"))


def stage(context: StageContext) -> StageOutcome:
    """Three steps with checkpoints, then an output whose content depends on the spec alone."""
    behave(context, behaviour_of(context))
    steps = context.checkpoints / "steps.txt"
    context.checkpoints.mkdir(parents=True, exist_ok=True)
    done = int(steps.read_text()) if steps.exists() else 0
    for step in range(done + 1, 4):
        context.recorder.record(step, {"loss": 1.0 / step})
        context.recorder.progress(step, 3, loss=1.0 / step)
        steps.write_text(str(step))
        if behaviour_of(context) == "die_at_2" and step == 2 and done == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    out = context.output("out.txt")
    out.write_text(f"{context.spec.stage} {context.spec.seed}\n")
    return StageOutcome({"out": out}, {"loss": 0.25}, {"resumed_at": done})


def behave(context: StageContext, behaviour: str) -> None:
    if behaviour == "user_error":
        raise StageError("row 7 of pairs.jsonl has no chosen answer", "remove it")
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "crash":
        raise RuntimeError("something broke inside")
    if behaviour == "exit_0":
        os._exit(0)
    if behaviour == "hang":
        hang(context)
    if behaviour == "hang_with_child":
        # A rank of torchrun lives in a session of its own.
        stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        context.output("stray.pid").write_text(str(stray.pid))
        hang(context)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hang(context)


def hang(context: StageContext) -> None:
    context.output("child.pid").write_text(str(os.getpid()))
    time.sleep(600)


def main() -> int:
    name, directory = sys.argv[1], Path(sys.argv[2])
    die_with_parent()
    watch_lease(directory)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    with (directory / "starts.jsonl").open("a") as starts:
        starts.write(json.dumps({"stage": name, "omp": os.environ.get("OMP_NUM_THREADS")}) + "\n")
    try:
        run_stage(directory, stage)
    except NightjarError as error:
        logging.getLogger("nightjar").error("%s: %s", type(error).__name__, error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Small stages in a real child process, for tests of the orchestration: `python -m nightjar_fakes STAGE DIRECTORY`.

They write real results: a real snapshot, model folders that load, a real evaluation report. What a stage does besides
is told by `params["behaviour"]` of its spec (tests of the launcher) or by the environment variable NIGHTJAR_FAKE,
`stage=behaviour,...` (tests of the whole night).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from training.context import StageContext, StageOutcome
from training.contract import read_json, write_json
from training.errors import NightjarError, StageError
from training.process import die_with_parent, run_stage, watch_lease

MODEL = "NIGHTJAR_FAKE_MODEL"


def behaviour_of(context: StageContext) -> str:
    told = dict(item.split("=") for item in os.environ.get("NIGHTJAR_FAKE", "").split(",") if item)
    return str(context.spec.params.get("behaviour") or told.get(context.spec.stage, "ok"))


def stage(context: StageContext) -> StageOutcome:
    """Three steps with checkpoints, then outputs whose content depends on the spec alone."""
    behave(context, behaviour_of(context))
    steps = context.checkpoints / "steps.txt"
    context.checkpoints.mkdir(parents=True, exist_ok=True)
    done = int(steps.read_text()) if steps.exists() else 0
    context.recorder.event("round", round=0, answers=3)
    for step in range(done + 1, 4):
        context.recorder.record(step, {"loss": 1.0 / step})
        context.recorder.progress(step, 3, loss=1.0 / step)
        steps.write_text(str(step))
        if behaviour_of(context) == "die_at_2" and step == 2 and done == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour_of(context) == "kill_parent_at_2" and step == 2 and done == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
    outputs = OUTPUTS.get(context.spec.stage, plain)(context) if context.spec.config else plain(context)
    return StageOutcome(outputs, METRICS.get(context.spec.stage, {"loss": 0.25}), {"resumed_at": done})


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
    if behaviour == "wait":
        wait_for_go(context)
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


def wait_for_go(context: StageContext) -> None:
    """Pause until somebody makes the file `go` in the home: time for a test to break something meanwhile."""
    context.output("waiting").touch()
    while not (Path(context.spec.home) / "go").exists():
        time.sleep(0.05)


def plain(context: StageContext) -> dict[str, Path]:
    out = context.output("out.txt")
    out.write_text(f"{context.spec.stage} {context.spec.seed}\n")
    return {"out": out}


def validate(context: StageContext) -> dict[str, Path]:
    from configs.schema.data import DataConfig  # imported here, since each stage is a process of its own
    from training.data.ingest import ingest

    config = context.section("data", DataConfig)
    uri = str(context.spec.params["source"])
    out = context.output("validation")
    done = ingest(config, out, seed=context.spec.seed, source_uri=uri)
    if behaviour_of(context) == "refuse_data":
        (out / "data_docs").mkdir()
        (out / "data_docs" / "index.html").write_text("one expectation failed")
        raise StageError("the snapshot breaks 1 expectations")
    return {"snapshot": Path(done.snapshot.uri), "quarantine": done.quarantine, "report": done.report_json}


def model(context: StageContext) -> dict[str, Path]:
    return {"model": _model_folder(context, "model")}


def reward_model(context: StageContext) -> dict[str, Path]:
    folder = context.output("reward_model")
    folder.mkdir(exist_ok=True)
    write_json(folder / "reward.json", {"of": context.spec.stage, "made_from": made_from(context)})
    (folder / "adapter_model.safetensors").write_bytes(made_from(context).encode())
    return {"reward_model": folder}


def annotate(context: StageContext) -> dict[str, Path]:
    write_json(context.output("view.json"), {"trajectories": []})
    return {"view": context.output("view.json")}


def ppo(context: StageContext) -> dict[str, Path]:
    adapter = context.output("adapter")
    adapter.mkdir(exist_ok=True)
    rank = context.spec.config["ppo"]["lora_rank"]
    write_json(adapter / "adapter_config.json", {"r": rank, "made_from": made_from(context)})
    write_json(context.output("inputs.json"), {"roles": sorted(context.spec.inputs)})
    return {"policy": _model_folder(context, "policy"), "adapter": adapter}


def evaluate(context: StageContext) -> dict[str, Path]:
    """The challenger is better by 0.5; behaviour `worse` turns that round, `unsure` makes it 0, `nan` not a number."""
    import numpy as np

    from training.evaluation.report import EvaluationReport, MetricBuilder, ModelDigest, write_report

    gain = {"worse": -0.5, "unsure": 0.0, "nan": np.nan}.get(behaviour_of(context), 0.5)
    rng = np.random.default_rng(context.spec.seed)
    start = rng.normal(0.0, 0.1, 64)
    new = start + gain + rng.normal(0.0, 0.05, 64)
    has_champion = context.has_input("champion")
    builder = MetricBuilder(seed=context.spec.seed, confidence=context.spec.params["confidence_levels"])
    metrics = tuple(
        builder.mean(name, new, start if has_champion else None, start) for name in ("reward", "gold_reward")
    )
    digests = {role: ref.sha256 for role, ref in context.spec.inputs.items()}
    report = EvaluationReport(
        night=context.spec.night,
        seed=context.spec.seed,
        prompt_set_digest="p",
        prompt_count=64,
        challenger=ModelDigest(name="challenger", sha256=digests["challenger"]),
        champion=ModelDigest(name="champion", sha256=digests["champion"]) if has_champion else None,
        reference=ModelDigest(name="reference", sha256=digests["reference"]),
        metrics=metrics,
    )
    write_report(context.output("report.json"), report)
    return {"report": context.output("report.json")}


def made_from(context: StageContext) -> str:
    """What tells outputs apart: inputs and night, and nothing of the place where the home lies."""
    digests = sorted(ref.sha256 for ref in context.spec.inputs.values())
    content = [context.spec.stage, context.spec.seed, digests, context.spec.params.get("night_index")]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _model_folder(context: StageContext, name: str) -> Path:
    folder = context.output(name)
    shutil.copytree(os.environ[MODEL], folder, dirs_exist_ok=True)
    settings = read_json(folder / "config.json") | {"nightjar_made_from": made_from(context)}
    write_json(folder / "config.json", settings)
    return folder


OUTPUTS = {
    "validate": validate,
    "base": model,
    "sft": model,
    "reward": reward_model,
    "distill": reward_model,
    "annotate": annotate,
    "ppo": ppo,
    "evaluate": evaluate,
}
METRICS = {
    "reward": {"accuracy": 0.81},
    "distill": {"accuracy": 0.79, "student_teacher_kl": 0.012},
}


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

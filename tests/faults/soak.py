"""Many short nights, each with a random fault: `python -m tests.faults.soak --nights 200 --seed 0 --out soak.json`.

The soak knows which nights were really better, which versions it spoilt and which it took down, and holds the registry
against that after every night: a champion comes from a better night, is not spoilt nor taken down, and no version
disappears. Exit code 1 when anything was counted that must stay 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent / "flows/fakes"), str(FOLDER / "fakes")]

from configs.schema.data import QuickstartConfig  # noqa: E402
from tests.faults import soak_night  # noqa: E402
from tests.faults.forked import Child, fork  # noqa: E402
from tests.faults.soak_counts import Counts, look  # noqa: E402
from tests.faults.soak_home import make_home, recall, remember  # noqa: E402
from tests.faults.soak_serving import SharedServing  # noqa: E402
from tests.faults.soak_stage import adopt_orphans, left_over  # noqa: E402
from training.data.quickstart import generate  # noqa: E402

INTERRUPTS = {"killed at any moment": "SIGKILL", "interrupted at any moment": "SIGINT"}
FAULTS = (
    "none", "none", "none", "no new data", *soak_night.EVALUATIONS, *soak_night.TRAINERS, "killed in a checkpoint",
    *soak_night.DEATHS, *soak_night.BEFORE_PROMOTION, "moved by hand during", "second night", "breach",
    "breach killed", *INTERRUPTS,
)  # fmt: skip
DIES = {*soak_night.DEATHS, *INTERRUPTS}
ENDS = {"Completed", "Skipped", "Rejected", "Undecided", "Failed"}
_PATIENCE_SECONDS = 1_800.0


@dataclass
class Soak:
    """One home, its nights, and what must be true of it. `better`: nights whose policy really was better."""

    home: Path
    config: Path
    draws: random.Random
    serving: SharedServing
    typical_seconds: float = 8.0
    counts: Counts = field(default_factory=Counts)
    champion: str | None = None
    ended_badly: bool = False
    known: set[str] = field(default_factory=set)
    spoilt: set[str] = field(default_factory=set)
    taken_down: set[str] = field(default_factory=set)
    torn: set[str] = field(default_factory=set)

    def night(self) -> None:
        """One night with one fault, and the look that follows."""
        self.counts.nights += 1
        fault = self.draws.choice(FAULTS)
        self.counts.faults[fault] += 1
        remember(self, fault)
        # After a bad end now and then nothing new has come: then that very night is gone on with.
        if fault != "no new data" and not (self.ended_badly and self.draws.random() < 0.5):
            self._deliver()
        self.serving.bring_into_step()
        started = time.monotonic()
        end = self._strike(fault)
        for process in left_over(self.serving.pids):
            self.counts.wrong("processes left", f"{fault}: {process}")
        self.serving.bring_into_step()
        self.counts.ends[end["name"] if end else "killed"] += 1
        self._judge_end(fault, end)
        self.ended_badly = end is None or end["name"] in ("Failed", "escaped")
        settle = self.draws.random() < 0.7
        self._judge_home(self._run(lambda: look(self.home, settle)), fault, settle)
        if fault.startswith("breach"):
            self._breach("before_move" if self.draws.random() < 0.5 else "after_move", fault)
        self._tell(f"{self.counts.nights} {fault}: {end or 'killed'} ({time.monotonic() - started:.1f} s)")
        remember(self, None)

    def go_on(self) -> None:
        """Take up an earlier sitting. A night in the middle of which it was halted is over, and settled."""
        fault = recall(self)
        if fault is not None:
            self.counts.ends["halted from outside"] += 1
            self.ended_badly = True
            self.serving.bring_into_step()
            self._judge_home(self._run(lambda: look(self.home, True)), fault, True)
            remember(self, None)

    def close(self) -> None:
        """The last start: everything is settled, and everything must be in order."""
        self._judge_home(self._run(lambda: look(self.home, True)), "the end", True)

    def _strike(self, fault: str) -> dict[str, str] | None:
        """Run the night under its fault; None when it was killed."""
        seed = self.draws.randrange(2**31)
        (self.home / "go").unlink(missing_ok=True)
        for stale in self.home.glob("runs/*/*/waiting"):
            stale.unlink()
        started = time.monotonic()
        night = fork(lambda: asdict(soak_night.run_night(self.config, fault, seed)), self.home)
        if fault == "second night":
            self._second(night)
        if fault in INTERRUPTS:
            night.signal_after(INTERRUPTS[fault], self.draws.uniform(0.0, self.typical_seconds))
        end = night.result(_PATIENCE_SECONDS)
        if fault == "none":
            self.typical_seconds = time.monotonic() - started
        return end

    def _second(self, first: Child) -> None:
        """A second start while the first night is at work is skipped."""
        while first.is_alive() and not list(self.home.glob("runs/*/*/waiting")):
            time.sleep(0.02)
        if first.is_alive():
            second = self._run(lambda: asdict(soak_night.run_night(self.config, "none", 0)))
            if second is None or second["name"] != "Skipped":
                self.counts.wrong("unexpected ends", f"a second night at once: {second}")
        (self.home / "go").touch()

    def _breach(self, moment: str, fault: str) -> None:
        before = self.champion
        deadly = moment if fault == "breach killed" else ""
        end = self._run(lambda: asdict(soak_night.take_down(self.home, deadly)))
        if end is not None and end["name"] == "RollbackRefused":
            return
        if end is not None and end["name"] != "rolled back":
            self.counts.wrong("unexpected ends", f"rollback of version {before}: {end}")
            return
        self.serving.bring_into_step()
        self.counts.rollbacks += 1
        if before is not None:
            self.taken_down.add(before)
        self._judge_home(self._run(lambda: look(self.home, True)), fault, True)

    def _judge_end(self, fault: str, end: dict[str, str] | None) -> None:
        if end is None:
            if fault not in DIES:
                self.counts.wrong("unexpected ends", f"{fault}: the process died")
            return
        escaped = fault in ("disk full", "interrupted at any moment") and end["name"] == "escaped"
        if (fault == "none" and end["name"] != "Completed") or (end["name"] not in ENDS and not escaped):
            self.counts.wrong("unexpected ends", f"{fault}: {end['name']}: {end['message'][:400]}")

    def _judge_home(self, seen: dict[str, Any] | None, fault: str, settled: bool) -> None:
        if seen is None:
            self.counts.wrong("unexpected ends", f"{fault}: the look itself failed")
            return
        wrong, counts = self.counts.wrong, self.counts
        counts.settled += len(seen["settled"])
        counts.torn_lines = seen["torn_lines"]
        if fault == "bytes changed" and seen["nights"]:
            # The newest one, whose bytes this fault changes: of this night, or of one that it has gone on with.
            self.spoilt |= set(seen["lost"]) & {max(seen["nights"], key=int)}
        for version in sorted((self.known - set(seen["nights"])) | (set(seen["lost"]) - self.spoilt)):
            wrong("lost versions", f"{fault}: version {version}")
        self.known |= set(seen["nights"])
        for process in seen["processes"]:
            wrong("processes left", f"{fault}: {process}")
        for checkpoint in sorted(set(seen["torn"]) - self.torn):
            wrong("torn checkpoints", f"{fault}: {checkpoint}")
        self.torn |= set(seen["torn"])
        if not seen["answers"]:
            wrong("champions that do not answer", f"{fault}: version {seen['champion']}: {seen['said'][:300]}")
        if settled:
            for run in seen["running"]:
                wrong("runs left RUNNING", f"{fault}: {run}")
            for _ in range(seen["open_acts"]):
                wrong("acts left open", fault)
        self._judge_champion(seen, fault, settled)

    def _judge_champion(self, seen: dict[str, Any], fault: str, settled: bool) -> None:
        """Before anybody has settled it, the alias may for a moment name what a killed promotion gave it."""
        now = seen["champion"]
        if now is None:
            if self.champion is not None:
                self.counts.wrong("wrong promotions", f"{fault}: there is no champion any more")
        elif not is_better(self.home, seen["nights"].get(now, "")):
            self.counts.wrong("wrong promotions", f"{fault}: version {now} comes from a night that was not better")
        elif now in self.spoilt and now != self.champion:  # damaged before it was promoted, not as champion
            self.counts.wrong("wrong promotions", f"{fault}: the bytes of version {now} were changed")
        elif now in self.taken_down and settled:
            self.counts.wrong("wrong promotions", f"{fault}: version {now} was taken down before")
        elif now != self.champion and now not in self.known - self.taken_down:
            self.counts.wrong("wrong promotions", f"{fault}: version {now} came from nowhere")
        self.counts.promotions += now is not None and now != self.champion and not fault.startswith("breach")
        self.champion = now

    def _deliver(self) -> None:
        """New data: another partition in the place of the last one."""
        settings = QuickstartConfig(pairs_per_night=60)
        source = self.home.parent / "source"
        source.mkdir(exist_ok=True)
        pq.write_table(generate(settings, 0, self.counts.nights), source / "pairs.parquet")

    def _run(self, act: Callable[[], Any]) -> Any:
        return fork(act, self.home).result(_PATIENCE_SECONDS)

    def _tell(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        for example in self.counts.examples[-3:]:
            if example.startswith(f"night {self.counts.nights}:"):
                sys.stderr.write(f"    {example}\n")


def is_better(home: Path, night: str) -> bool:
    """Judged without the gate: the mean reward of the night's policy is well above the reference's."""
    try:
        report = json.loads((home / "runs" / night / "evaluate/report.json").read_text(encoding="utf-8"))
        overall = report["metrics"][0]["overall"]
        gain = float(overall["challenger"]["value"]) - float(overall["reference"]["value"])
    except (OSError, KeyError, ValueError):
        return False
    return math.isfinite(gain) and gain > 0.25


def main(arguments: list[str] | None = None) -> int:
    """Run the soak, write the counts, and say by the exit code whether they are as they must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--nights", type=int, default=200, help="of all sittings together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after the night that passes this")
    parser.add_argument("--folder", type=Path, help="keep the home here, and go on with the one that is here")
    parser.add_argument("--out", type=Path, help="write the counts to this JSON file after every night")
    options = parser.parse_args(arguments)
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "NIGHTJAR_HOME", "NIGHTJAR_TRAIN_DEPLOYMENT"):
        os.environ.pop(name, None)
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nightjar-soak-")))
        home, config = make_home(folder.resolve())
        serving = SharedServing(home.parent / "serving")
        stack.callback(serving.end)
        adopt_orphans()
        soak_night.prepare(stack.enter_context(pytest.MonkeyPatch.context()), serving)
        soak = Soak(home, config, random.Random(options.seed), serving)
        soak.go_on()
        _nights(soak, options)
    sys.stdout.write(json.dumps(soak.counts.shown(), indent=1) + "\n")
    return 0 if soak.counts.sound else 1


def _nights(soak: Soak, options: argparse.Namespace) -> None:
    """Night after night; SIGTERM ends the sitting after the one that is at work."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    started, before = time.monotonic(), soak.counts.seconds
    while soak.counts.nights < options.nights and time.monotonic() - started < options.minutes * 60 and not told:
        soak.night()
        soak.counts.seconds = round(before + time.monotonic() - started, 1)
        _write(soak, options.out)
    soak.close()
    _write(soak, options.out)


def _write(soak: Soak, out: Path | None) -> None:
    remember(soak, None)
    if out is not None:
        out.write_text(json.dumps(soak.counts.shown(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""DPO on a cell: TRL in an environment of its own, from the same reference, on the same pairs, in the same budget."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.schema import NightConfig
from tests.benchmarks.alignment.cells import Grid, prepare
from tests.benchmarks.alignment.exam import Examiner, read_split_of
from tests.benchmarks.alignment.ppo_run import POINTS
from tests.benchmarks.alignment.results import Cell, RunResult
from tests.benchmarks.alignment.variants import dpo_name
from training.contract import write_json
from training.examples import Encoder, encode_pairs
from training.models.tokenize import prompt_text

TRL = "trl==1.16.0"
CHILD = Path(__file__).with_name("dpo_child.py")
BATCH_SIZE, BETA = 16, 0.1


def ensure_environment(folder: Path) -> Path:
    """The Python of TRL's environment, made on first use: TRL and what it adds, beside the packages that run now."""
    python = folder / "bin" / "python"
    done = folder / "ready"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = folder / "lib" / version / "site-packages"
        (site / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-compile", TRL], check=True)
        done.write_text(TRL)
    return python


class Worker:
    """One child for all cells, since importing its libraries costs as much as a short run. Ends with the context."""

    def __init__(self, python: Path, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self._stream = log, log.open("ab")
        environment = os.environ | {"TQDM_DISABLE": "1", "HF_DATASETS_CACHE": str(log.parent / "datasets")}
        self._child = subprocess.Popen(
            [str(python), "-P", str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stream,
            text=True,
            env=environment,
        )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._child.communicate()  # the end of its input is its end
        self._stream.close()

    def run(self, job: Path) -> None:
        """Train what the job file says; raises RuntimeError when the child dies."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(BrokenPipeError):
            self._child.stdin.write(f"{job}\n")
            self._child.stdin.flush()
            for line in self._child.stdout:
                if line.startswith("DONE"):
                    return
        raise RuntimeError(f"DPO's child died; see {self.log}")


def run_rates(grid: Grid, cell: Cell, rates: Sequence[float], worker: Worker, budget: float) -> list[RunResult]:
    """Train every rate in the worker, then let the cell's examiner measure what it left."""
    prepared, config = prepare(grid, cell), grid.night(cell)
    examiner = Examiner(config, prepared.materials)
    folder = grid.folder(cell) / "work" / "dpo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    assert prepared.materials.reference is not None
    job = {
        "model": prepared.materials.reference.path, "out": str(folder), "rates": list(rates), "seed": cell.seed,
        "marks": [grid.budget * number / POINTS for number in range(1, round(POINTS * budget / grid.budget) + 1)],
        "batch_size": BATCH_SIZE, "beta": BETA, "pairs": _pairs(examiner, prepared.materials, config),
        "max_length": config.models.max_prompt_length + config.models.max_response_length + 1,
    }  # fmt: skip
    write_json(folder / "job.json", job)
    worker.run(folder / "job.json")
    found = [_measured(cell, rate, budget, folder / f"{rate:.0e}", examiner, prepared.facts) for rate in rates]
    shutil.rmtree(folder)
    return found


def _pairs(examiner: Examiner, materials: Any, config: NightConfig) -> list[dict[str, Any]]:
    """Training pairs as text and as the tokens that the product reads; TRL adds the end of text itself."""
    tokenizer = examiner.reference.backbone.tokenizer
    rows = read_split_of(materials, "train")
    kept, _ = encode_pairs(rows, Encoder(tokenizer, config.models))
    by_id: dict[Any, Any] = {row["row_id"]: row for row in rows}
    return [
        {
            "prompt": tokenizer.bos_token + prompt_text(tokenizer, by_id[pair.row_id]["prompt"]),
            "chosen": f" {by_id[pair.row_id]['chosen'].strip()}",
            "rejected": f" {by_id[pair.row_id]['rejected'].strip()}",
            "prompt_ids": list(pair.group.prompt_ids), "chosen_ids": list(pair.group.responses[0]),
            "rejected_ids": list(pair.group.responses[1]),
        }
        for pair in kept
    ]  # fmt: skip


def _measured(
    cell: Cell, rate: float, budget: float, folder: Path, examiner: Examiner, facts: dict[str, Any]
) -> RunResult:
    points = [examiner.of_reference()]
    marks = json.loads((folder / "points.json").read_text())
    for number, mark in enumerate(marks):
        target = folder / f"point-{number}"
        examiner.reference.backbone.tokenizer.save_pretrained(str(target))
        points.append(examiner.examine(examiner.load(str(target)), mark["seconds"], mark["updates"]))
    facts = facts | {"epochs": marks[-1]["epoch"], "batch_size": BATCH_SIZE, "beta": BETA, "trl": TRL}
    return RunResult(cell.noise, cell.seed, dpo_name(rate), budget, points, points[-1], facts=facts)

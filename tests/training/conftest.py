"""A tiny real night for the training core: snapshot, Llama folder with its own tokenizer, and each stage's output.

Everything is made once a session, in this process, on one thread, without any network. Fixtures import torch only when
asked for, so that the tests of torch-free modules stay torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NIGHTJAR_DEVICE": "cpu",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}.items():
    os.environ[_name] = _value


def _output(directory: Path, stage: str, role: str) -> Path:
    from tests.training.stages import run_here

    return Path(run_here(directory, stage).output(role).path)


@pytest.fixture(scope="session")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home of the session's night."""
    return tmp_path_factory.mktemp("night")


@pytest.fixture(scope="session")
def snapshot(night: Path) -> Path:
    """120 pairs on sums: 84 to train on, 20 for validation, 16 for evaluation."""
    from tests.training.stages import arithmetic_rows, write_snapshot

    return write_snapshot(night / "snapshot", arithmetic_rows())


@pytest.fixture(scope="session")
def base_folder(night: Path, snapshot: Path) -> Path:
    """A Llama of width 32 and two layers, untrained, with a tokenizer trained on the snapshot."""
    from tests.training.stages import write_stage

    return _output(write_stage(night / "base", "base", {"snapshot": snapshot}), "base", "model")


@pytest.fixture(scope="session")
def reference_folder(night: Path, snapshot: Path, base_folder: Path) -> Path:
    """The base after six steps of imitation."""
    from tests.training.stages import write_stage

    directory = write_stage(night / "sft", "sft", {"snapshot": snapshot, "base": base_folder})
    return _output(directory, "sft", "model")


@pytest.fixture(scope="session")
def teacher_folder(night: Path, snapshot: Path, reference_folder: Path) -> Path:
    """A full reward model with two heads."""
    from tests.training.stages import write_stage

    directory = write_stage(night / "reward", "reward", {"snapshot": snapshot, "reference": reference_folder})
    return _output(directory, "reward", "reward_model")


@pytest.fixture(scope="session")
def student_folder(night: Path, snapshot: Path, reference_folder: Path, teacher_folder: Path) -> Path:
    """A LoRA reward model on the reference's first layer."""
    from tests.training.stages import write_stage

    inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder}
    return _output(write_stage(night / "distill", "distill", inputs), "distill", "reward_model")


@pytest.fixture(scope="session")
def view_file(night: Path, snapshot: Path, reference_folder: Path, student_folder: Path) -> Path:
    """The view of the annotated store in `night / "store"`."""
    from tests.training.stages import write_stage

    inputs = {"snapshot": snapshot, "reference": reference_folder, "reward_model": student_folder}
    directory = write_stage(night / "annotate", "annotate", inputs, store_params(night))
    return _output(directory, "annotate", "view")


@pytest.fixture(scope="session")
def ppo_inputs(snapshot: Path, reference_folder: Path, student_folder: Path, view_file: Path) -> dict[str, Path]:
    """Inputs of a ppo stage by role; its params are `store_params(night)`."""
    return {"snapshot": snapshot, "reference": reference_folder, "reward_model": student_folder, "view": view_file}


def store_params(night: Path) -> dict[str, object]:
    """Params of the stages that touch the trajectory store."""
    return {"store": str(night / "store"), "night_index": 0}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """`run(stage, inputs, **sections)`: a stage of the tiny night in a fresh folder; returns its result."""
    from tests.training.stages import SEED, run_here, write_stage

    count = iter(range(100))

    def go(stage: str, inputs: dict[str, Path], seed: int = SEED, **sections: Any) -> Any:
        return run_here(write_stage(tmp_path / f"{stage}-{next(count)}", stage, inputs, seed=seed, **sections), stage)

    return go

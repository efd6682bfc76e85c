"""A stage on one rank and on two that share it some way: the same weights and the same history, to float tolerance."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.schema.base import Section
from tests.training.forks import run_ranks
from tests.training.stages import run_here, write_stage
from training.contract import METRICS, read_result
from training.recorder import read_lines

UNTIMED = ("time", "tokens_per_second")


def history(directory: Path) -> list[dict]:
    steps = [line for line in read_lines(directory / METRICS) if "event" not in line]
    return [{key: value for key, value in line.items() if key not in UNTIMED} for line in steps]


def assert_close(one: Path, two: Path, role: str) -> None:
    """Weights and history of two runs agree to float tolerance."""
    first, second = history(one), history(two)
    assert [line["step"] for line in first] == [line["step"] for line in second]
    for line, other in zip(first, second, strict=True):
        assert line == pytest.approx(other, rel=2e-3, abs=2e-4)
    files = [Path(read_result(directory).output(role).path) for directory in (one, two)]
    names = [sorted(f.relative_to(folder) for f in folder.rglob("*.safetensors")) for folder in files]
    assert names[0] == names[1]
    assert names[0]
    for name in names[0]:
        left, right = (load_file(folder / name) for folder in files)
        for key, tensor in left.items():
            torch.testing.assert_close(right[key], tensor, atol=1e-4, rtol=1e-3)


def run_both(
    tmp_path: Path, stage: str, inputs: dict[str, Path], params: dict, role: str,
    strategy: Mapping[str, str] | None = None, **sections: Section,
) -> None:  # fmt: skip
    """`strategy`: the environment that names how the two ranks share; none is replicas."""
    one = write_stage(tmp_path / "one", stage, inputs, params, **sections)
    two = write_stage(tmp_path / "two", stage, inputs, params, **sections)
    assert run_shared(two, stage, strategy or {}) == [0, 0]
    run_here(one, stage)
    assert_close(one, two, role)


def run_shared(directory: Path, stage: str, strategy: Mapping[str, str]) -> list[int]:
    """Run the stage on two ranks; their exit codes."""

    def work() -> None:
        os.environ.update(strategy)
        run_here(directory, stage)

    return run_ranks(2, work)

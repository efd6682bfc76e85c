"""Are two runs of a stage the same run? Every tensor, every optimiser moment, every metric, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from training.checkpoint import Checkpoint, CheckpointFolder
from training.contract import METRICS, read_result
from training.recorder import read_lines

TIMED = {"time", "tokens_per_second", "seconds", "teacher_seconds", "speed_ratio", "peak_memory_mb"}
OF_THE_PLACE = {"key", "metrics_position"}  # another folder is another spec; a time may take another number of digits


def assert_same_run(one: Path, other: Path) -> None:
    """Outputs, result, history, and what the last checkpoints hold."""
    assert_same_outputs(one, other)
    for line, same in zip(history(one), history(other), strict=False):
        assert line == same
    assert len(history(one)) == len(history(other))
    for folder in ("checkpoints", "good_states"):
        mine, theirs = CheckpointFolder(one / folder), CheckpointFolder(other / folder)
        assert mine.steps() == theirs.steps(), folder
        for step in mine.steps():
            assert_same_checkpoint(mine.at(step), theirs.at(step))


def history(directory: Path) -> list[dict[str, Any]]:
    """All metric lines and events without what a clock decides."""
    return [_timeless(line) for line in read_lines(directory / METRICS)]


def assert_same_outputs(one: Path, other: Path) -> None:
    """Same files with the same bytes, or where a file tells of a tensor, the same tensors; the same result."""
    first, second = read_result(one), read_result(other)
    assert first.outputs.keys() == second.outputs.keys()
    for role, ref in first.outputs.items():
        left, right = Path(ref.path), Path(second.outputs[role].path)
        for file in _files(left):
            assert file in _files(right), f"{role}/{file}"
            if file.suffix == ".safetensors":
                assert_same_tensors(load_file(left / file), load_file(right / file))
        assert ref.sha256 == second.outputs[role].sha256, role
    assert _timeless(first.metrics) == _timeless(second.metrics)
    assert _plain(_timeless(first.facts)) == _plain(_timeless(second.facts))


def assert_same_checkpoint(one: Checkpoint, other: Checkpoint) -> None:
    """Same tensors and the same state."""
    assert one.step == other.step
    assert_same_tensors(one.tensors, other.tensors)
    left, right = ({k: v for k, v in c.state.items() if k not in OF_THE_PLACE} for c in (one, other))
    assert _plain(_timeless(left)) == _plain(_timeless(right))


def assert_same_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit, NaN included."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.shape == other[name].shape, name
        mine, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other[name]))
        assert torch.equal(mine, theirs), name


def _files(folder: Path) -> list[Path]:
    return sorted(f.relative_to(folder) for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else []


def _timeless(content: Any) -> Any:
    """Without the numbers that a clock decides, however deep."""
    if isinstance(content, Mapping):
        return {key: _timeless(value) for key, value in content.items() if key not in TIMED}
    return [_timeless(value) for value in content] if isinstance(content, list | tuple) else content


def _plain(content: Any) -> str:
    """NaN equals NaN."""
    return repr(content)

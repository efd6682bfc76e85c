"""Laws of checkpoints: the newest whole one is used, whatever was torn, tampered with, or killed half way."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import training.checkpoint as module
from tests.training.forks import KILLED, kill_at_call, run_forked
from training.checkpoint import CheckpointFolder, group, prefixed
from training.errors import CheckpointError

FILES = ("tensors.safetensors", "state.json", "manifest.json")


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Every dtype that a checkpoint carries."""
    return {
        "weights": torch.full((3, 4), float(step)) + torch.arange(4) / 3,
        "half": torch.full((2,), step, dtype=torch.bfloat16),
        "double": torch.tensor([step / 3], dtype=torch.float64),
        "counts": torch.tensor([step, step * 2**40]),
        "flags": torch.tensor([True, False]),
        "bytes": torch.tensor([step % 256], dtype=torch.uint8),
        "nothing": torch.zeros((0, 3)),
        "scalar": torch.tensor(float(step)),
        "odd values": torch.tensor([math.nan, math.inf, -0.0]),
    }


def state(step: int) -> dict[str, Any]:
    return {"step": step, "best": -math.inf, "nested": {"list": [1, 2.5, None, "é"]}}


def saved(folder: Path, *steps: int, keep: int = 2) -> CheckpointFolder:
    checkpoints = CheckpointFolder(folder / "checkpoints", keep=keep)
    for step in steps:
        checkpoints.save(step, tensors(step), state(step))
    return checkpoints


def assert_is(checkpoint: module.Checkpoint | None, step: int) -> None:
    assert checkpoint is not None
    assert checkpoint.step == step
    assert checkpoint.state == state(step)
    expected = tensors(step)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        found = checkpoint.tensors[name]
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert (
            found.numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes()
            if name != "half"
            else (torch.equal(found, tensor))
        )


def test_nothing_saved_is_nothing(tmp_path: Path):
    assert CheckpointFolder(tmp_path / "none").latest() is None
    assert CheckpointFolder(tmp_path / "none").steps() == []


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path):
    assert_is(saved(tmp_path, 3).latest(), 3)
    assert_is(CheckpointFolder(tmp_path / "checkpoints").at(3), 3)


def test_tensors_that_share_memory_or_are_views_can_be_saved(tmp_path: Path):
    whole = torch.arange(12.0).reshape(3, 4)
    CheckpointFolder(tmp_path).save(1, {"a": whole, "b": whole, "row": whole[1], "turned": whole.T}, {})
    found = CheckpointFolder(tmp_path).latest().tensors
    assert torch.equal(found["b"], whole)
    assert torch.equal(found["row"], whole[1])
    assert torch.equal(found["turned"], whole.T)


def test_later_training_does_not_reach_into_a_checkpoint(tmp_path: Path):
    tensor = torch.zeros(3)
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, {"x": tensor}, {})
    tensor.fill_(9)
    assert torch.equal(checkpoints.latest().tensors["x"], torch.zeros(3))


def test_some_are_kept_and_some_are_pinned(tmp_path: Path):
    checkpoints = saved(tmp_path, 1, 2, 3, 10)
    assert checkpoints.steps() == [3, 10]
    checkpoints.save(100, tensors(100), state(100), pinned=(3,))
    assert checkpoints.steps() == [3, 10, 100]
    assert saved(tmp_path / "one", 1, 2, keep=1).steps() == [2]


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.save(2, tensors(7), state(7))
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.latest().state["step"] == 7


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("mask", [0x01, 0x20, 0xFF])
def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path, file: str, mask: int):
    saved(tmp_path, 1, 2)
    target = tmp_path / "checkpoints" / "step_00000002" / file
    content = target.read_bytes()
    places = range(len(content)) if file == "manifest.json" else range(0, len(content), 37)
    for place in places:
        target.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
        checkpoints = CheckpointFolder(tmp_path / "checkpoints")
        found = checkpoints.latest()
        if found is not None and found.step == 2:  # a manifest whose meaning is the same, such as another space
            assert file == "manifest.json"
            assert_is(found, 2)
            continue
        assert_is(found, 1)
        assert len(checkpoints.refused) == 1
        assert "step_00000002" in checkpoints.refused[0]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99, None])
def test_a_torn_or_lost_file_is_refused(tmp_path: Path, file: str, keep: float | None):
    saved(tmp_path, 1, 2)
    target = tmp_path / "checkpoints" / "step_00000002" / file
    if keep is None:
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[: int(keep * target.stat().st_size)])
    assert_is(CheckpointFolder(tmp_path / "checkpoints").latest(), 1)
    with pytest.raises(CheckpointError, match="step_00000002"):
        CheckpointFolder(tmp_path / "checkpoints").at(2)


@pytest.mark.parametrize("content", ["[]", "{}", '"text"', "3", '{"tensors.safetensors": 1, "state.json": 2}'])
def test_a_manifest_of_another_shape_is_refused(tmp_path: Path, content: str):
    saved(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step_00000002" / "manifest.json").write_text(content)
    assert_is(CheckpointFolder(tmp_path / "checkpoints").latest(), 1)


def test_every_one_spoilt_is_none(tmp_path: Path):
    saved(tmp_path, 1, 2)
    for file in (tmp_path / "checkpoints").rglob("state.json"):
        file.write_text("{}")
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    assert len(checkpoints.refused) == 2


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path):
    checkpoints = saved(tmp_path, 1)
    (checkpoints.folder / "step_00000009").mkdir()
    assert_is(checkpoints.latest(), 1)


def test_strangers_in_the_folder_are_left_alone(tmp_path: Path):
    checkpoints = saved(tmp_path, 1)
    (checkpoints.folder / "step_notes.txt").write_text("mine")
    assert_is(checkpoints.latest(), 1)
    checkpoints.save(2, tensors(2), state(2))
    assert checkpoints.steps() == [1, 2]
    assert (checkpoints.folder / "step_notes.txt").exists()


def test_a_missing_step_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="step_00000005"):
        saved(tmp_path, 1).at(5)


def test_what_lies_ahead_of_a_save_is_forgotten(tmp_path: Path):
    """Steps beyond the one saved are of a run that was given up, or torn: they must never be resumed from, nor push
    the checkpoints of this run out."""
    checkpoints = saved(tmp_path, 50, 100)
    (checkpoints.folder / "step_00000100" / "state.json").write_text("torn")
    for step in (60, 70):
        checkpoints.save(step, tensors(step), state(step))
    assert checkpoints.steps() == [60, 70]
    fresh = saved(tmp_path, 5)
    assert fresh.steps() == [5]
    assert_is(fresh.latest(), 5)


ACTS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path, again: bool):
    """SIGKILL before the n-th act on the file system, for every n, in a real child."""
    before = saved(tmp_path / "before", 1, 2)
    step = 2 if again else 3
    deaths = 0
    for number in range(1, 60):
        folder = Path(shutil.copytree(before.folder, tmp_path / f"at-{number}"))

        def save(folder: Path = folder, number: int = number) -> None:
            counted = kill_at_call(number, lambda act, *a, **k: act(*a, **k))
            for name in ACTS:
                act = getattr(os, name)
                mock.patch.object(os, name, lambda *a, act=act, **k: counted(act, *a, **k)).start()
            write = module.save_file
            mock.patch.object(module, "save_file", lambda *a, **k: counted(write, *a, **k)).start()
            CheckpointFolder(folder).save(step, tensors(step + 10), state(step + 10))

        code = run_forked(save)
        found = CheckpointFolder(folder).latest()
        assert found is not None
        assert found.state in ({step: state(step + 10)}.get(found.step), state(found.step))
        assert found.step >= 1 if again else found.step >= 2
        for kept in CheckpointFolder(folder).steps():
            assert CheckpointFolder(folder).at(kept).step == kept, "complete or absent, also the one that goes"
        CheckpointFolder(folder).save(4, tensors(4), state(4))
        assert_is(CheckpointFolder(folder).latest(), 4)
        assert not list(folder.glob(".*")), "what the dead left was not cleared"
        if code == 0:
            break
        assert code == KILLED
        deaths += 1
    assert code == 0
    assert deaths >= 8


@pytest.mark.parametrize("limit", [64, 300, 4_000])
def test_a_full_disk_is_said_in_words_and_the_one_before_is_intact(tmp_path: Path, limit: int):
    """RLIMIT_FSIZE is the disk: whichever file hits it, the write fails and nothing half done stays."""
    before = saved(tmp_path, 1)
    big = {"weights": torch.arange(2_000.0)}

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(CheckpointError, match=r"step_00000002: not written(.|\n)*free disk space"):
            CheckpointFolder(before.folder).save(2, big if limit == 4_000 else {}, {"text": "x" * 400})
        assert not list(before.folder.glob(".*"))

    assert run_forked(fill) == 0
    assert before.steps() == [1]
    assert_is(before.latest(), 1)
    before.save(2, tensors(2), state(2))
    assert_is(before.latest(), 2)


def test_a_state_that_is_not_json_leaves_nothing_behind(tmp_path: Path):
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(TypeError):
        checkpoints.save(2, tensors(2), {"array": torch.zeros(2)})
    assert not list(checkpoints.folder.glob(".*"))
    assert_is(checkpoints.latest(), 1)


def test_no_pickle_anywhere(tmp_path: Path):
    saved(tmp_path, 1)
    assert sorted(f.name for f in (tmp_path / "checkpoints" / "step_00000001").iterdir()) == sorted(FILES)
    json.loads((tmp_path / "checkpoints" / "step_00000001" / "manifest.json").read_text())


def test_groups_are_put_on_and_taken_off():
    given = {"a.b": torch.ones(1), "c/d": torch.zeros(1)}
    flat = prefixed("policy", given) | prefixed("policy_ema", {"a.b": torch.full((1,), 3.0)})
    assert set(flat) == {"policy/a.b", "policy/c/d", "policy_ema/a.b"}
    assert group("policy", flat).keys() == given.keys()
    assert torch.equal(group("policy_ema", flat)["a.b"], torch.full((1,), 3.0))
    assert group("none", flat) == {}

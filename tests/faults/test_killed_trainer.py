"""A real trainer with real checkpoints, killed, starved of disk, killed once too often; and what it comes to."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tasks import launch_plan
from tasks.last_config import site_of
from tasks.night_state import NightBook
from tasks.registry import CHAMPION
from tests.faults.meanwhile import meanwhile, once_checkpointed
from tests.faults.soundness import assert_next_night_works, assert_sound
from tests.flows.nights import Nights
from training.checkpoint import CheckpointFolder
from training.contract import read_result
from training.recorder import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SFT = {"run": "always", "epochs": 6, "batch_size": 2, "checkpoint_every": 5, "eval_every": 50, "learning_rate": 1e-3}
SMALLER_THAN_A_CHECKPOINT = 100_000
"""Bytes; the log and the metrics of so short a stage stay far below."""


@pytest.fixture
def trained(new_home: Callable[..., Nights], monkeypatch: pytest.MonkeyPatch) -> Nights:
    """A home whose sft stage is the real one."""
    monkeypatch.delitem(launch_plan.MODULES, "sft")
    return new_home(sft=SFT)


def sft_of(nights: Nights, index: int) -> Path:
    return nights.home / f"runs/fault-{index:04d}/sft"


def kill(process: psutil.Process) -> None:
    process.kill()


def fill_the_disk(process: psutil.Process) -> None:
    """From now on no file of the trainer grows beyond this, checkpoints above all."""
    process.rlimit(resource.RLIMIT_FSIZE, (SMALLER_THAN_A_CHECKPOINT, SMALLER_THAN_A_CHECKPOINT))


def model_of(nights: Nights, index: int) -> str:
    return read_result(sft_of(nights, index)).output("model").sha256


def first_told(nights: Nights, index: int) -> float:
    """When the first step that still counts was taken, seconds since 1970."""
    return read_lines(sft_of(nights, index) / "metrics.jsonl")[0]["time"]


def test_killed_once_it_goes_on_from_its_checkpoint_to_the_same_weights(trained, new_home) -> None:
    with meanwhile(once_checkpointed(sft_of(trained, 1), kill)):
        state = trained.run()
    assert state.is_completed(), state.message
    assert NightBook(trained.home).load("fault-0001").stages["sft"].attempts == 2
    assert_sound(trained.home)

    undisturbed = new_home(sft=SFT)
    assert undisturbed.run().is_completed()
    assert NightBook(undisturbed.home).load("fault-0001").stages["sft"].attempts == 1
    assert model_of(trained, 1) == model_of(undisturbed, 1)
    assert assert_next_night_works(trained) == "2"


def test_killed_once_too_often_the_night_fails_and_goes_on_later(trained) -> None:
    assert trained.run().is_completed()
    with meanwhile(once_checkpointed(sft_of(trained, 2), kill, times=2)):
        state = trained.run()
    assert state.is_failed()
    assert "SIGKILL" in state.message
    assert "goes on from the last checkpoint" in state.message
    assert site_of(trained.home).registry.alias(CHAMPION) == "1"
    assert_sound(trained.home)

    again = time.time()
    state = trained.run()
    assert state.is_completed(), state.message
    assert first_told(trained, 2) < again, "it began from the start, not from the checkpoint"
    assert_sound(trained.home)
    assert assert_next_night_works(trained) == "3"


def test_disk_full_during_a_checkpoint(trained, new_home) -> None:
    with meanwhile(once_checkpointed(sft_of(trained, 1), fill_the_disk)):
        state = trained.run()
    assert state.is_failed()
    assert "not written" in state.message
    assert "free disk space" in state.message
    intact = CheckpointFolder(sft_of(trained, 1) / "checkpoints")
    assert intact.latest() is not None
    assert intact.refused == []
    assert_sound(trained.home)

    again = time.time()
    state = trained.run()
    assert state.is_completed(), state.message
    assert first_told(trained, 1) < again, "it began from the start, not from the checkpoint"
    undisturbed = new_home(sft=SFT)
    assert undisturbed.run().is_completed()
    assert model_of(trained, 1) == model_of(undisturbed, 1)
    assert assert_next_night_works(trained) == "2"

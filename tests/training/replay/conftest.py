"""Trajectories to fill stores with, and a folder to do it in."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.replay.trajectory import SamplingSettings, Trajectory


def build_trajectory(number: int, *, recorded: bool = True, **changes: Any) -> Trajectory:
    """Trajectory `number`, always the same: 2 to 6 prompt tokens, 1 to 7 response tokens, five answers a prompt."""
    generator = np.random.default_rng(number)
    response = generator.integers(0, 1_000, 1 + number % 7, dtype=np.int32)
    content: dict[str, Any] = {
        "prompt_id": f"prompt-{number // 5}",
        "prompt_ids": [number, *generator.integers(0, 1_000, 1 + number % 5).tolist()],
        "response_ids": response,
        "policy_version": "policy-a",
        "created_night": 0,
        "eos": number % 2 == 0,
        "score": float(number),
        "reward_source": "gold",
        "source": "unit",
    }
    if recorded:
        content["behavior_log_probs"] = -generator.random(len(response), dtype=np.float32)
        content["sampling"] = SamplingSettings(temperature=0.7, top_p=0.9, top_k=40)
    return Trajectory(**(content | changes))


@pytest.fixture
def make() -> Callable[..., Trajectory]:
    """`build_trajectory`."""
    return build_trajectory


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in memory where there is one.

    Killing a process does not ask which disk it wrote to, and the hundreds of fsyncs of these tests are then free.
    """
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="nightjar-test-") as folder:
        yield Path(folder)

"""The small ppo stage behind a trainer that saves real checkpoints and is killed somewhere in the middle of that."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

import nightjar_fakes
import torch

from training.checkpoint import CheckpointFolder
from training.contract import CHECKPOINTS, read_spec
from training.process import die_with_parent

LONGEST_SECONDS = 0.2
SIZE = 20_000


def main() -> int:
    die_with_parent()
    directory = Path(sys.argv[2])
    checkpoints = CheckpointFolder(directory / CHECKPOINTS)
    if not (directory / "killed").exists():
        (directory / "killed").touch()
        draws = random.Random(f"{read_spec(directory).key}/moment of death")
        death = threading.Timer(draws.uniform(0.0, LONGEST_SECONDS), os.kill, (os.getpid(), signal.SIGKILL))
        death.start()
        for step in range(1, 1_000_000):
            checkpoints.save(step, {"weights": torch.full((SIZE,), float(step))}, {"step": step})
    found = checkpoints.latest()
    if found is not None and not bool((found.tensors["weights"] == found.state["step"]).all()):
        raise AssertionError(f"checkpoint {found.step} holds the weights of another step")
    return nightjar_fakes.main()


if __name__ == "__main__":
    sys.exit(main())

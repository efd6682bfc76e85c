"""Named random generators: each draw of a run comes from (root seed, name), so a name's draws never shift another's.

A generator made for a position (epoch, round, step) needs no state in the checkpoint beside the root seed; one that
lives across positions is kept by its owner and saved with it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch


def named_seed(root: int, name: str) -> int:
    """A 63-bit seed from the root seed and a name such as "rollout/round=3"."""
    return int.from_bytes(hashlib.sha256(f"{root}/{name}".encode()).digest()[:8], "big") >> 1


def torch_generator(root: int, name: str) -> torch.Generator:
    """A CPU generator; draws are moved to the device, so that devices agree."""
    return torch.Generator().manual_seed(named_seed(root, name))


def numpy_generator(root: int, name: str) -> np.random.Generator:
    """The same for numpy."""
    return np.random.default_rng(named_seed(root, name))


class seeded_init:
    """Context in which library code that draws from torch's global generator (weight initialisation) is seeded.

    The global state is put back afterwards: nothing else depends on it.
    """

    def __init__(self, root: int, name: str) -> None:
        self._seed = named_seed(root, name)
        self._fork = torch.random.fork_rng()

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *exception: Any) -> None:
        self._fork.__exit__(*exception)

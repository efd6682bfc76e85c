"""Random inputs: float64 arrays that are exact in float32, ragged masks, and poison where it must not matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
POISON = (np.nan, np.inf, -np.inf)
LAWS = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    """Normal numbers that float32 holds exactly, so that oracle and implementation read the same input."""
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(np.float64)


def ragged_mask(rng: np.random.Generator, rows: int, columns: int) -> Bools:
    """Valid tokens with holes, rows of different length, and, from three rows on, a last row without any."""
    mask = np.arange(columns)[None, :] < rng.integers(1, columns + 1, size=(rows, 1))
    mask &= rng.random((rows, columns)) < 0.8
    mask[0, 0] = True
    if rows > 2:
        mask[-1] = False
    return mask


def poisoned(rng: np.random.Generator, x: Floats, mask: Bools) -> Floats:
    """`x` with NaN and infinities in its masked slots."""
    return np.where(mask, x, rng.choice(POISON, size=x.shape))


def tensor(x: Floats, requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(x, dtype=dtype, requires_grad=requires_grad)


def bools(mask: Bools) -> Tensor:
    return torch.tensor(mask, dtype=torch.bool)


def close(actual: Any, expected: Any, rtol: float = 2e-5, atol: float = 2e-6, what: str = "") -> None:
    """Assert closeness to the oracle; NaN never equals NaN here."""
    if isinstance(actual, Tensor):
        assert actual.dtype == torch.float32, f"{what}: {actual.dtype}"
        actual = actual.detach().double().numpy()
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, equal_nan=False, err_msg=what)


def gradient(leaf: Tensor) -> Floats:
    assert leaf.grad is not None
    return leaf.grad.double().numpy()


@dataclass(frozen=True)
class Batch:
    """One PPO minibatch as arrays [B, R]; `poison` says whether the masked slots hold NaN and infinities."""

    mask: Bools
    log_probs: Floats
    old_log_probs: Floats
    advantages: Floats
    values: Floats
    old_values: Floats
    returns: Floats
    weights: Floats

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def num_sequences(self) -> int:
        return int(self.mask.any(axis=1).sum())

    def rows(self, index: slice | NDArray[np.int64]) -> Batch:
        return Batch(*(getattr(self, field)[index] for field in self.__dataclass_fields__))


def batch(seed: int, rows: int = 5, columns: int = 7, poison: bool = True, mask: Bools | None = None) -> Batch:
    rng = np.random.default_rng(seed)
    if mask is None:
        mask = ragged_mask(rng, rows, columns)
    rows, columns = mask.shape
    old = -np.abs(normal(rng, rows, columns))
    fields = [
        old + normal(rng, rows, columns, scale=0.9),  # ratios well on both sides of every clip
        old,
        normal(rng, rows, columns, scale=1.5),
        normal(rng, rows, columns),
        normal(rng, rows, columns, scale=0.8),
        normal(rng, rows, columns),
        np.abs(normal(rng, rows, columns)) + 0.1,
    ]
    fields[0] = fields[0].astype(np.float32).astype(np.float64)
    return Batch(mask, *(poisoned(rng, x, mask) if poison else x for x in fields))


@st.composite
def masks(draw: st.DrawFn, max_rows: int = 4, max_columns: int = 6) -> Bools:
    """Any mask at all: empty ones, holes, padding on either side."""
    rows, columns = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    bits = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    return np.array(bits, dtype=bool).reshape(rows, columns)


seeds = st.integers(0, 2**32 - 1)

"""Laws of the reduction of token losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.objectives import oracles
from tests.training.objectives.cases import (
    LAWS,
    MODES,
    Bools,
    bools,
    close,
    gradient,
    masks,
    normal,
    poisoned,
    seeds,
    tensor,
)
from training.objectives import aggregate
from training.objectives.aggregate import weighted

modes = st.sampled_from(MODES)


@LAWS
@given(masks(), seeds, modes)
def test_any_mask_agrees_with_the_oracle(mask: Bools, seed: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    x = poisoned(rng, normal(rng, *mask.shape), mask)
    leaf = tensor(x, requires_grad=True)
    out = aggregate(leaf, bools(mask), mode)
    close(out, oracles.aggregate(x, mask, mode))
    out.backward()
    assert np.isfinite(gradient(leaf)).all()
    assert (gradient(leaf)[~mask] == 0).all()


@LAWS
@given(masks(), seeds, modes, st.data())
def test_any_split_adds_up(mask: Bools, seed: int, mode: str, data: st.DataObject) -> None:
    """Rows dealt out to microbatches in any way, empty microbatches included."""
    rng = np.random.default_rng(seed)
    x = poisoned(rng, normal(rng, *mask.shape), mask)
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=mask.shape[0], max_size=mask.shape[0])))
    counts = {"num_tokens": int(mask.sum()), "num_sequences": torch.tensor(int(mask.any(1).sum()))}
    whole = tensor(x, requires_grad=True)
    total = aggregate(whole, bools(mask), mode)
    total.backward()
    parts = tensor(x, requires_grad=True)
    sums = [aggregate(parts[torch.tensor(owner == i)], bools(mask[owner == i]), mode, **counts) for i in range(3)]
    sum(sums).backward()
    close(sum(float(part.detach()) for part in sums), float(total.detach()))
    close(gradient(parts), gradient(whole))


@LAWS
@given(masks(), seeds, modes)
def test_order_and_padding_do_not_matter(mask: Bools, seed: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    x = normal(rng, *mask.shape)
    expected = float(aggregate(tensor(x), bools(mask), mode))
    rows, columns = rng.permutation(mask.shape[0]), rng.permutation(mask.shape[1])
    close(aggregate(tensor(x[rows][:, columns]), bools(mask[rows][:, columns]), mode), expected)
    wide = np.pad(x, ((0, 2), (1, 3)), constant_values=np.nan)
    close(aggregate(tensor(wide), bools(np.pad(mask, ((0, 2), (1, 3)))), mode), expected)


@LAWS
@given(masks(), st.floats(-10, 10, width=32))
def test_means_of_a_constant_are_that_constant(mask: Bools, value: float) -> None:
    x = torch.full(mask.shape, value)
    expected = value if mask.any() else 0.0
    close(aggregate(x, bools(mask), "token-mean"), expected)
    close(aggregate(x, bools(mask), "seq-mean-token-mean"), expected)
    rows = int(mask.any(1).sum())
    close(aggregate(x, bools(mask), "seq-mean-token-sum"), value * mask.sum() / rows if rows else 0.0, atol=1e-5)


def test_the_modes_differ_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [10.0, math.nan, math.nan], [math.nan] * 3])
    mask = torch.tensor([[True, True, True], [True, False, False], [False] * 3])
    close(aggregate(x, mask, "token-mean"), 4.0)
    close(aggregate(x, mask, "seq-mean-token-sum"), 8.0)
    close(aggregate(x, mask, "seq-mean-token-mean"), 6.0)
    close(aggregate(x, mask, "token-mean", num_tokens=32), 0.5)
    close(aggregate(x, mask, "seq-mean-token-mean", num_sequences=3.0), 4.0)
    close(aggregate(x, mask, "seq-mean-token-mean", num_tokens=99), 6.0)


def test_an_empty_mask_gives_zero_that_can_be_differentiated() -> None:
    for mode in MODES:
        for counts in ({}, {"num_tokens": 0, "num_sequences": 0}, {"num_tokens": 8, "num_sequences": 2}):
            x = torch.full((2, 3), torch.nan, requires_grad=True)
            out = aggregate(x, torch.zeros(2, 3, dtype=torch.bool), mode, **counts)
            out.backward()
            assert float(out.detach()) == 0.0
            assert x.grad is not None
            assert (x.grad == 0).all()


def test_low_precision_is_summed_in_float32() -> None:
    x = torch.full((4, 512), 0.1).bfloat16()
    close(aggregate(x, torch.ones(4, 512, dtype=torch.bool), "token-mean"), float(x[0, 0].double()), rtol=1e-6)


def test_weights_by_sequence_and_by_token() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    loss = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    close(weighted(loss, torch.tensor([2.0, 0.5, torch.nan]), mask), [[2.0, 4.0], [1.5, 0.0], [0.0, 0.0]])
    by_token = torch.tensor([[2.0, 0.5], [1.0, torch.nan], [torch.inf, torch.nan]])
    close(weighted(loss, by_token, mask), [[2.0, 1.0], [3.0, 0.0], [0.0, 0.0]])
    assert weighted(loss, None, mask) is loss
    for wrong in (torch.ones(2), torch.ones(3, 1), torch.ones(3, 2, 1)):
        with pytest.raises(ValueError, match="weights has shape"):
            weighted(loss, wrong, mask)
    with pytest.raises(TypeError, match="weights must be floating"):
        weighted(loss, torch.ones(3, dtype=torch.long), mask)


def test_wrong_inputs_are_refused() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="unknown aggregation 'mean': choose one of token-mean"):
        aggregate(x, mask, "mean")
    with pytest.raises(TypeError, match="bool"):
        aggregate(x, mask.float(), "token-mean")
    with pytest.raises(TypeError, match="x must be floating"):
        aggregate(x.long(), mask, "token-mean")
    with pytest.raises(ValueError, match="x has shape"):
        aggregate(x[:1], mask, "token-mean")
    with pytest.raises(ValueError, match=r"\[B, R\]"):
        aggregate(x[0], mask[0], "token-mean")
    for count in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="count"):
            aggregate(x, mask, "token-mean", num_tokens=count)

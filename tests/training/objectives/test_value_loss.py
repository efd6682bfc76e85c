"""Laws of the clipped value loss and of explained variance."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.objectives import oracles
from tests.training.objectives.cases import (
    LAWS,
    MODES,
    Batch,
    Bools,
    Floats,
    batch,
    bools,
    close,
    gradient,
    masks,
    normal,
    seeds,
    tensor,
)
from training.objectives import ValueFit, ValueLoss, value_fit, value_loss


def run(data: Batch, **options: Any) -> tuple[ValueLoss, Floats]:
    values = tensor(data.values, requires_grad=True)
    out = value_loss(values, tensor(data.old_values), tensor(data.returns), bools(data.mask), **options)
    out.loss.backward()
    return out, gradient(values)


def one_token(value: float, old: float, target: float, **options: Any) -> tuple[float, float]:
    leaf = torch.tensor([[value]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    out = value_loss(leaf, torch.tensor([[old]]), torch.tensor([[target]]), mask, **options)
    out.loss.backward()
    return float(out.loss.detach()), float(gradient(leaf).item())


@LAWS
@given(masks(), seeds, st.sampled_from(MODES), st.sampled_from([None, 0.1, 0.5]))
def test_any_mask_agrees_with_the_oracle(mask: Bools, seed: int, mode: str, cliprange: float | None) -> None:
    data = batch(seed, mask=mask)
    out, slope = run(data, loss_agg_mode=mode, cliprange_value=cliprange, weights=tensor(data.weights))
    loss, clip_frac, explained = oracles.value_loss(
        data.values, data.old_values, data.returns, mask, cliprange=cliprange, weights=data.weights, mode=mode
    )
    close(out.loss, loss, atol=1e-5)
    close(out.clip_frac, clip_frac)
    close(out.explained_variance, explained, rtol=1e-3, atol=1e-4)
    assert np.isfinite(slope).all()
    assert (slope[~mask] == 0).all()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.2, 1.0, 3.0, 0.5 * 1.8**2, -1.8),  # inside the range
        (2.5, 1.0, 3.0, 0.5 * 1.5**2, 0.0),  # ran ahead of the range: held back, no gradient
        (2.5, 1.0, 0.0, 0.5 * 2.5**2, 2.5),  # ran away from the target: the full error
        (-1.0, 1.0, -3.0, 0.5 * 3.5**2, 0.0),  # ran ahead downwards
        (2.0, 0.0, 2.0, 0.5 * 1.5**2, 0.0),  # right, but too soon
    ],
)
def test_by_hand(value: float, old: float, target: float, loss: float, slope: float) -> None:
    assert one_token(value, old, target) == (pytest.approx(loss, rel=1e-5), pytest.approx(slope, rel=1e-5))


@LAWS
@given(masks(), seeds, st.floats(0.01, 2.0))
def test_clipping_is_pessimistic_and_its_absence_is_half_the_squared_error(
    mask: Bools, seed: int, cliprange: float
) -> None:
    data = batch(seed, mask=mask)
    plain, _ = run(data, cliprange_value=None)
    errors = [0.5 * (data.values[index] - data.returns[index]) ** 2 for index in oracles.valid_slots(mask)]
    close(plain.loss, sum(errors) / max(1, len(errors)))
    assert float(plain.clip_frac) == 0.0
    clipped, _ = run(data, cliprange_value=cliprange)
    assert float(clipped.loss.detach()) >= float(plain.loss.detach()) - 1e-6
    wide, _ = run(data, cliprange_value=1e6)
    close(wide.loss, float(plain.loss.detach()))


@LAWS
@given(masks(), seeds, st.sampled_from(MODES))
def test_order_and_padding_do_not_matter(mask: Bools, seed: int, mode: str) -> None:
    data = batch(seed, mask=mask)
    expected, slope = run(data, loss_agg_mode=mode)
    order = np.random.default_rng(seed).permutation(mask.shape[0])
    shuffled, shuffled_slope = run(data.rows(order), loss_agg_mode=mode)
    names = list(data.__dataclass_fields__)[1:]
    wide = [np.pad(getattr(data, name), ((0, 1), (2, 1)), constant_values=np.nan) for name in names]
    padded, _ = run(Batch(np.pad(mask, ((0, 1), (2, 1))), *wide), loss_agg_mode=mode)
    for got in (shuffled, padded):
        for one, other in zip(got, expected, strict=True):
            close(one, float(other.detach()), rtol=1e-4, atol=1e-5)
    close(shuffled_slope, slope[order])


def test_weights() -> None:
    data = batch(3, rows=4, columns=5)
    plain, slope = run(data)
    tripled, tripled_slope = run(data, weights=torch.full((4,), 3.0))
    close(tripled.loss, 3 * float(plain.loss.detach()))
    close(tripled_slope, 3 * slope)
    assert torch.equal(tripled.clip_frac, plain.clip_frac)


def test_an_empty_mask_gives_zeros_that_can_be_differentiated() -> None:
    out, slope = run(batch(0, mask=np.zeros((2, 3), dtype=bool)))
    assert [float(x.detach()) for x in out] == [0.0] * 3
    assert (slope == 0).all()


def test_low_precision_is_computed_in_float32() -> None:
    data = batch(1)
    low = [tensor(x, dtype=torch.bfloat16) for x in (data.values, data.old_values, data.returns)]
    out = value_loss(*low, bools(data.mask))
    same = value_loss(*(x.float() for x in low), bools(data.mask))
    for one, other in zip(out, same, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


# explained variance


def explained(values: Floats, returns: Floats) -> float:
    everything = torch.ones(values.shape, dtype=torch.bool)
    return float(value_fit(tensor(values), tensor(returns), everything).explained_variance())


def test_explained_variance_of_known_critics() -> None:
    returns = normal(np.random.default_rng(0), 8, 50)
    assert explained(returns, returns) == 1.0
    assert explained(returns + 5.0, returns) == pytest.approx(1.0, abs=1e-5)  # an offset is not unexplained variance
    assert explained(np.full((8, 50), 3.0), returns) == pytest.approx(0.0, abs=1e-5)
    assert explained(-returns, returns) == pytest.approx(-3.0, rel=1e-4)
    assert explained(0.5 * returns, returns) == pytest.approx(0.75, rel=1e-4)


@LAWS
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 40), seeds)
def test_constant_returns_explain_nothing(value: float, columns: int, seed: int) -> None:
    assert explained(normal(np.random.default_rng(seed), 2, columns), np.full((2, columns), value)) == 0.0


def test_two_passes_survive_a_large_offset() -> None:
    rng = np.random.default_rng(1)
    returns = (normal(rng, 4, 100) + 3e3).astype(np.float32).astype(np.float64)
    values = (returns + normal(rng, 4, 100, scale=0.5)).astype(np.float32).astype(np.float64)
    everything = np.ones((4, 100), dtype=bool)
    assert explained(values, returns) == pytest.approx(
        oracles.explained_variance(values, returns, everything), rel=1e-3
    )


@LAWS
@given(masks(max_rows=5), seeds, st.data())
def test_fits_of_any_split_merge_into_the_whole(mask: Bools, seed: int, data: st.DataObject) -> None:
    rows = batch(seed, mask=mask)
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=mask.shape[0], max_size=mask.shape[0])))

    def fit(keep: Bools) -> ValueFit:
        return value_fit(tensor(rows.values[keep]), tensor(rows.returns[keep]), bools(mask[keep]))

    whole, merged = fit(owner >= 0), reduce(ValueFit.merge, [fit(owner == i) for i in range(3)])
    for name in ("num_tokens", "return_mean", "return_squares", "residual_mean", "residual_squares"):
        close(getattr(merged, name), float(getattr(whole, name)), rtol=1e-4, atol=1e-5, what=name)


def test_wrong_inputs_are_refused() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for bad in ((x[:1], x, x), (x, x[:, :2], x), (x, x, x[0])):
        with pytest.raises(ValueError, match="has shape"):
            value_loss(*bad, mask)
    with pytest.raises(TypeError, match="response_mask must be bool"):
        value_loss(x, x, x, mask.float())
    with pytest.raises(TypeError, match="returns must be floating"):
        value_loss(x, x, x.long(), mask)
    for cliprange in (0.0, -0.5, math.nan):
        with pytest.raises(ValueError, match="cliprange_value"):
            value_loss(x, x, x, mask, cliprange_value=cliprange)
    with pytest.raises(ValueError, match="unknown aggregation"):
        value_loss(x, x, x, mask, loss_agg_mode="sum")
    with pytest.raises(ValueError, match="values has shape"):
        value_fit(x[0], x, mask)

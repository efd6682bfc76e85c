"""Laws of the clipped policy loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.training.objectives import oracles
from tests.training.objectives.cases import (
    LAWS,
    MODES,
    Batch,
    Bools,
    batch,
    bools,
    close,
    gradient,
    masks,
    seeds,
    tensor,
)
from training.objectives import PolicyLoss, policy_loss


def run(data: Batch, **options: Any) -> tuple[PolicyLoss, Tensor]:
    now = tensor(data.log_probs, requires_grad=True)
    out = policy_loss(now, tensor(data.old_log_probs), tensor(data.advantages), bools(data.mask), **options)
    out.loss.backward()
    assert now.grad is not None
    return out, now.grad


def one_token(log_ratio: float, advantage: float, **options: Any) -> tuple[float, float]:
    """(loss, d loss / d log_prob) of a batch of one token."""
    now = torch.tensor([[log_ratio]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    out = policy_loss(now, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, **options)
    out.loss.backward()
    return float(out.loss.detach()), float(gradient(now).item())


@LAWS
@given(masks(), seeds, st.sampled_from(MODES), st.booleans())
def test_any_mask_agrees_with_the_oracle(mask: Bools, seed: int, mode: str, dual: bool) -> None:
    data, c = batch(seed, mask=mask), 2.0 if dual else None
    out, slope = run(data, loss_agg_mode=mode, clip_ratio_c=c, weights=tensor(data.weights))
    expected = oracles.policy_loss(
        data.log_probs, data.old_log_probs, data.advantages, mask, c=c, weights=data.weights, mode=mode
    )
    for name, got, value in zip(out._fields, out, expected, strict=True):
        close(got, value, atol=1e-5, what=name)
    assert slope.isfinite().all()
    assert (slope[bools(~mask)] == 0).all()


@LAWS
@given(masks(), seeds)
def test_at_ratio_one_it_is_the_policy_gradient(mask: Bools, seed: int) -> None:
    """The first minibatch of a round: loss -mean A, gradient -A / n, nothing clipped, no KL."""
    data = batch(seed, mask=mask)
    data = Batch(mask, data.old_log_probs, *(getattr(data, name) for name in list(data.__dataclass_fields__)[2:]))
    out, slope = run(data)
    n = max(1, data.num_tokens)
    advantages = np.where(mask, data.advantages, 0.0)
    close(out.loss, -advantages.sum() / n)
    close(slope.double().numpy(), -advantages / n)
    assert float(out.clip_frac) == float(out.clip_frac_lower) == float(out.approx_kl) == 0.0


@LAWS
@given(st.floats(-5, 5), st.floats(-4, 4), st.floats(0, 0.9), st.floats(0, 2), st.floats(1.01, 6))
def test_bounds(log_ratio: float, advantage: float, low: float, high: float, c: float) -> None:
    options = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": c}
    loss, _ = one_token(log_ratio, advantage, **options)
    slack = 1e-4 * (1 + abs(advantage))
    if advantage >= 0:
        assert loss >= -(1 + high) * advantage - slack  # no more reward than the clip allows
    else:
        assert loss <= -c * advantage + slack  # no more punishment than the dual clip allows
        assert loss >= min(-(1 - low) * advantage, -c * advantage) - slack
    plain, _ = one_token(log_ratio, advantage, **(options | {"clip_ratio_c": None}))
    ratio = math.exp(float(np.float32(log_ratio)))
    assert plain >= -ratio * advantage - slack * max(1, ratio)  # pessimistic: never below the unclipped surrogate
    assert loss == plain if advantage >= 0 else loss <= plain


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [
        (0.5, 1.0, False),  # above 1 + high, and more of it is asked for: stop
        (0.5, -1.0, True),  # above, but it must come down: go
        (-0.5, -1.0, False),  # below 1 - low, and less of it is asked for: stop
        (-0.5, 1.0, True),  # below, but it must come up: go
        (2.0, -1.0, False),  # ratio 7.4 beyond the dual clip
        (25.0, -1.0, False),  # beyond the clamp of the log-ratio
    ],
)
def test_where_the_gradient_stops(log_ratio: float, advantage: float, moves: bool) -> None:
    _, slope = one_token(log_ratio, advantage)
    assert (slope != 0) == moves
    if moves:
        assert slope == pytest.approx(-advantage * math.exp(log_ratio), rel=1e-5)


def test_dual_clip_by_hand() -> None:
    """Ratio e^2 = 7.39: A = -1 costs 3 with the dual clip and 7.39 without; A = +1 earns 1.2 either way."""
    assert one_token(2.0, -1.0)[0] == pytest.approx(3.0)
    assert one_token(2.0, -1.0, clip_ratio_c=None)[0] == pytest.approx(math.exp(2), rel=1e-6)
    assert one_token(2.0, 1.0)[0] == one_token(2.0, 1.0, clip_ratio_c=None)[0] == pytest.approx(-1.2)
    assert one_token(300.0, -1.0, clip_ratio_c=None)[0] == pytest.approx(math.exp(20), rel=1e-5)


def test_metrics_by_hand() -> None:
    log_ratio = torch.tensor([[1.0, -1.0, 0.0, 2.0], [1.0, -1.0, math.nan, math.nan]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0], [-1.0, -1.0, math.nan, math.nan]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    out = policy_loss(log_ratio, torch.zeros(2, 4), advantages, mask)
    close(out.clip_frac, 2 / 6)  # ratio e with A > 0, ratio 1/e with A < 0
    close(out.clip_frac_lower, 1 / 6)  # ratio e^2 with A < 0; e is below 3
    close(out.approx_kl, -2 / 6)


@LAWS
@given(masks(), seeds, st.sampled_from(MODES))
def test_order_and_padding_do_not_matter(mask: Bools, seed: int, mode: str) -> None:
    data = batch(seed, mask=mask)
    expected, slope = run(data, loss_agg_mode=mode)
    order = np.random.default_rng(seed).permutation(mask.shape[0])
    shuffled, shuffled_slope = run(data.rows(order), loss_agg_mode=mode)
    wide = Batch(
        np.pad(mask, ((0, 1), (2, 1))),
        *(
            np.pad(getattr(data, name), ((0, 1), (2, 1)), constant_values=np.nan)
            for name in list(data.__dataclass_fields__)[1:]
        ),
    )
    padded, padded_slope = run(wide, loss_agg_mode=mode)
    for got in (shuffled, padded):
        for one, other in zip(got, expected, strict=True):
            close(one, float(other.detach()), atol=1e-5)
    close(shuffled_slope, slope[torch.tensor(order)].double().numpy())
    close(padded_slope[: mask.shape[0], 2:-1], slope.double().numpy())


def test_weights() -> None:
    data = batch(3, rows=4, columns=5)
    plain, slope = run(data)
    ones, _ = run(data, weights=torch.ones(4))
    assert torch.equal(ones.loss, plain.loss)
    doubled, doubled_slope = run(data, weights=torch.full((4, 5), 2.0))
    close(doubled.loss, 2 * float(plain.loss.detach()))
    close(doubled_slope, 2 * slope.double().numpy())
    nothing, no_slope = run(data, weights=torch.zeros(4))
    assert float(nothing.loss.detach()) == 0.0
    assert (no_slope == 0).all()
    for metric in ("clip_frac", "clip_frac_lower", "approx_kl"):
        assert torch.equal(getattr(nothing, metric), getattr(plain, metric))  # metrics are shares of tokens, unweighted


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_gives_zeros_that_can_be_differentiated(mode: str) -> None:
    data = batch(0, mask=np.zeros((2, 3), dtype=bool))
    out, slope = run(data, loss_agg_mode=mode, weights=tensor(data.weights))
    assert [float(x.detach()) for x in out] == [0.0] * 4
    assert (slope == 0).all()


def test_low_precision_is_computed_in_float32() -> None:
    data = batch(1)
    now = tensor(data.log_probs, dtype=torch.bfloat16)
    out = policy_loss(
        now.requires_grad_(), tensor(data.old_log_probs).bfloat16(), tensor(data.advantages), bools(data.mask)
    )
    same = policy_loss(
        now.detach().float(), tensor(data.old_log_probs).bfloat16().float(), tensor(data.advantages), bools(data.mask)
    )
    for one, other in zip(out, same, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
    out.loss.backward()
    assert now.grad is not None
    assert now.grad.dtype == torch.bfloat16


def test_only_the_loss_has_a_gradient() -> None:
    out, _ = run(batch(2))
    assert [x.requires_grad for x in out] == [True, False, False, False]


def test_nan_in_a_valid_slot_is_not_hidden() -> None:
    data = batch(4, poison=False)
    data.log_probs[0, 0] = np.nan
    now = tensor(data.log_probs)
    out = policy_loss(now, tensor(data.old_log_probs), tensor(data.advantages), bools(data.mask))
    assert out.loss.isnan()
    assert out.approx_kl.isnan()


def test_wrong_inputs_are_refused() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for bad in ((x[:1], x, x), (x, x[:, :2], x), (x, x, x[0])):
        with pytest.raises(ValueError, match="has shape"):
            policy_loss(*bad, mask)
    with pytest.raises(TypeError, match="response_mask must be bool"):
        policy_loss(x, x, x, mask.int())
    with pytest.raises(TypeError, match="advantages must be floating"):
        policy_loss(x, x, x.long(), mask)
    for c in (1.0, 0.5, -3.0, math.nan):
        with pytest.raises(ValueError, match="clip_ratio_c must be above 1"):
            policy_loss(x, x, x, mask, clip_ratio_c=c)
    for low in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="clip_ratio_low"):
            policy_loss(x, x, x, mask, clip_ratio_low=low)
    with pytest.raises(ValueError, match="clip_ratio_high"):
        policy_loss(x, x, x, mask, clip_ratio_high=-0.1)
    with pytest.raises(ValueError, match="unknown aggregation"):
        policy_loss(x, x, x, mask, loss_agg_mode="sum")
    with pytest.raises(ValueError, match="weights has shape"):
        policy_loss(x, x, x, mask, weights=torch.ones(3))

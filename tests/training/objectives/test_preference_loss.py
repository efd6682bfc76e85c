"""Laws of the Bradley-Terry loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.objectives import oracles
from tests.training.objectives.cases import LAWS, close, gradient, normal, seeds, tensor
from training.objectives import bradley_terry_loss

pairs = st.integers(0, 9)


def loss_of(chosen: list[float], rejected: list[float], **options: Any) -> float:
    return float(bradley_terry_loss(torch.tensor(chosen), torch.tensor(rejected), **options))


@LAWS
@given(pairs, seeds, st.floats(0, 0.45), st.floats(0, 1))
def test_any_pairs_agree_with_the_oracle(n: int, seed: int, smoothing: float, center: float) -> None:
    rng = np.random.default_rng(seed)
    chosen, rejected, margin, weights = normal(rng, 4, n, scale=2.0)
    weights = np.abs(weights)
    out = bradley_terry_loss(
        tensor(chosen),
        tensor(rejected),
        margin=tensor(margin),
        label_smoothing=smoothing,
        center_coef=center,
        weights=tensor(weights),
    )
    expected = oracles.bradley_terry(
        chosen, rejected, margin=margin, smoothing=smoothing, center=center, weights=weights
    )
    close(out, expected, rtol=1e-4, atol=1e-5)


def test_by_hand() -> None:
    assert loss_of([1.0], [1.0]) == pytest.approx(math.log(2))
    assert loss_of([2.0], [0.0]) == pytest.approx(math.log1p(math.exp(-2)), rel=1e-6)
    assert loss_of([0.0], [2.0]) == pytest.approx(2 + math.log1p(math.exp(-2)), rel=1e-6)
    assert loss_of([3.0], [0.0], margin=3.0) == pytest.approx(math.log(2))
    assert loss_of([2.0], [1.0], center_coef=0.1) - loss_of([2.0], [1.0]) == pytest.approx(0.9, rel=1e-5)


@LAWS
@given(st.floats(-20, 20), st.floats(-20, 20), st.floats(-5, 5))
def test_swapping_and_shifting(chosen: float, rejected: float, shift: float) -> None:
    """l(c, r) - l(r, c) = -(c - r); a constant added to all scores does not show."""
    forward, backward = loss_of([chosen], [rejected]), loss_of([rejected], [chosen])
    assert forward - backward == pytest.approx(rejected - chosen, abs=1e-4)
    assert loss_of([chosen + shift], [rejected + shift]) == pytest.approx(forward, abs=1e-4)


@LAWS
@given(st.floats(-6, 6), st.floats(0.01, 0.45))
def test_smoothing_is_unbiased_under_flipped_labels(gap: float, rate: float) -> None:
    """(1 - e) L(c, r) + e L(r, c) = l(c, r): in expectation over the noise, the loss on clean labels."""
    kept = loss_of([gap], [0.0], label_smoothing=rate)
    flipped = loss_of([0.0], [gap], label_smoothing=rate)
    assert (1 - rate) * kept + rate * flipped == pytest.approx(loss_of([gap], [0.0]), rel=1e-3, abs=1e-4)


def test_large_margins_stay_finite() -> None:
    scores = torch.tensor([1e4, -1e4], requires_grad=True)
    out = bradley_terry_loss(scores, -scores.detach())
    close(out, 1e4, rtol=1e-6)
    out.backward()
    close(gradient(scores), [0.0, -0.5])


def test_gradient_by_finite_differences_of_the_implementation() -> None:
    rng = np.random.default_rng(0)
    scores = tensor(normal(rng, 2, 4))
    options = {"label_smoothing": 0.1, "center_coef": 0.2, "weights": tensor(np.abs(normal(rng, 4)))}
    leaf = scores.clone().requires_grad_()
    bradley_terry_loss(leaf[0], leaf[1], **options).backward()
    for index in np.ndindex(2, 4):
        step = torch.zeros(2, 4)
        step[index] = 1e-2
        up, down = (float(bradley_terry_loss(x[0], x[1], **options)) for x in (scores + step, scores - step))
        assert gradient(leaf)[index] == pytest.approx((up - down) / 2e-2, rel=1e-2, abs=1e-4)


@LAWS
@given(st.integers(2, 9), st.integers(0, 9), seeds)
def test_splits_add_up_and_order_does_not_matter(n: int, cut: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chosen, rejected, weights = (tensor(x) for x in (*normal(rng, 2, n), np.abs(normal(rng, n))))
    options: dict[str, Any] = {"label_smoothing": 0.2, "center_coef": 0.3}
    whole = float(bradley_terry_loss(chosen, rejected, weights=weights, **options))
    for count in (n, torch.tensor(n)):
        parts = [
            bradley_terry_loss(chosen[part], rejected[part], weights=weights[part], num_pairs=count, **options)
            for part in (slice(0, cut), slice(cut, n))
        ]
        close(parts[0] + parts[1], whole)
    order = torch.tensor(rng.permutation(n))
    close(bradley_terry_loss(chosen[order], rejected[order], weights=weights[order], **options), whole)


def test_weights() -> None:
    assert loss_of([1.0, 2.0], [0.0, 0.0], weights=torch.ones(2)) == loss_of([1.0, 2.0], [0.0, 0.0])
    half = loss_of([1.0, 9.0], [0.0, 1.0], weights=torch.tensor([1.0, 0.0]))
    assert half == pytest.approx(loss_of([1.0], [0.0]) / 2)  # divided by the pairs, not by the weights
    weights = torch.ones(1, requires_grad=True)
    chosen = torch.ones(1, requires_grad=True)
    bradley_terry_loss(chosen, torch.zeros(1), weights=weights, margin=weights).backward()
    assert weights.grad is None


def test_a_pair_of_weight_zero_cannot_poison() -> None:
    chosen = torch.tensor([1.0, torch.nan], requires_grad=True)
    out = bradley_terry_loss(chosen, torch.tensor([0.0, torch.inf]), weights=torch.tensor([1.0, 0.0]))
    close(out, loss_of([1.0], [0.0]) / 2)
    out.backward()
    assert gradient(chosen)[1] == 0.0
    assert np.isfinite(gradient(chosen)).all()


def test_nan_in_a_pair_that_counts_is_not_hidden() -> None:
    assert math.isnan(loss_of([1.0, math.nan], [0.0, 0.0]))


def test_no_pairs_give_zero_that_can_be_differentiated() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    for count in (None, 0, 7):
        out = bradley_terry_loss(nothing, torch.zeros(0), center_coef=0.1, num_pairs=count)
        out.backward()
        assert float(out.detach()) == 0.0


def test_low_precision_is_computed_in_float32() -> None:
    chosen, rejected = torch.tensor([1.5, -0.3]).bfloat16(), torch.tensor([0.2, 0.7]).bfloat16()
    out = bradley_terry_loss(chosen, rejected)
    assert torch.equal(out, bradley_terry_loss(chosen.float(), rejected.float()))
    assert out.dtype == torch.float32


def test_wrong_inputs_are_refused() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="rejected_scores has shape"):
        bradley_terry_loss(x, x[:2])
    with pytest.raises(ValueError, match=r"\[P\]"):
        bradley_terry_loss(x.unsqueeze(-1), x.unsqueeze(-1))
    with pytest.raises(TypeError, match="floating"):
        bradley_terry_loss(x.long(), x)
    with pytest.raises(ValueError, match="margin has shape"):
        bradley_terry_loss(x, x, margin=x[:2])
    with pytest.raises(ValueError, match="margin"):
        bradley_terry_loss(x, x, margin=math.nan)
    with pytest.raises(ValueError, match="weights has shape"):
        bradley_terry_loss(x, x, weights=x[:2])
    for smoothing in (0.5, 0.9, -0.1, math.nan):
        with pytest.raises(ValueError, match="label_smoothing"):
            bradley_terry_loss(x, x, label_smoothing=smoothing)
    for center in (-0.1, math.nan):
        with pytest.raises(ValueError, match="center_coef"):
            bradley_terry_loss(x, x, center_coef=center)
    with pytest.raises(ValueError, match="count"):
        bradley_terry_loss(x, x, num_pairs=-1)

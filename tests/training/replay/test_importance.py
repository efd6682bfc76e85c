"""importance_weights and effective_sample_fraction against their formulas in float64, and their laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.replay.importance import effective_sample_fraction, importance_weights

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip_to", "mask")


def oracle(log_ratio, mask, level, mode, threshold, clip_to):
    """One number at a time, in Python floats."""
    result = np.zeros(log_ratio.shape)
    for b in range(log_ratio.shape[0]):
        valid = [r for r in range(log_ratio.shape[1]) if mask[b, r]]
        total = sum(float(log_ratio[b, r]) for r in valid)
        for r in valid:
            exponent = {"token": float(log_ratio[b, r]), "sequence": total, "geometric": total / len(valid)}[level]
            weight = math.exp(max(-20.0, min(20.0, exponent)))
            if mode == "truncate":
                weight = min(weight, threshold)
            elif mode == "clip_to":
                weight = clip_to if weight > threshold else weight
            else:
                low, high = threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)
                weight = weight if low <= weight <= high else 0.0
            result[b, r] = weight
    return result


@st.composite
def batches(draw):
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**31))
    generator = np.random.default_rng(seed)
    log_ratio = generator.normal(scale=draw(st.sampled_from([0.1, 1.0, 15.0])), size=(rows, columns))
    return log_ratio.astype(np.float32), generator.random((rows, columns)) < draw(st.sampled_from([0.0, 0.5, 1.0]))


@given(batches(), st.sampled_from(LEVELS), st.sampled_from(MODES), st.sampled_from([1.0001, 1.5, 7.3]))
def test_equals_the_formula(batch, level, mode, threshold):
    log_ratio, mask = batch
    found = importance_weights(
        torch.tensor(log_ratio), torch.tensor(mask), level=level, mode=mode, threshold=threshold, clip_to=1.2
    )
    expected = oracle(log_ratio, mask, level, mode, threshold, 1.2)
    close = np.isclose(found.numpy(), expected, rtol=2e-5, atol=1e-12)
    # A weight within rounding of the threshold may fall on either side of it.
    raw = oracle(log_ratio, mask, level, "truncate", math.inf, None)
    edge = np.isclose(raw, threshold, rtol=1e-4) | np.isclose(raw, 1 / threshold, rtol=1e-4)
    assert (close | edge).all()


@given(batches(), st.sampled_from(LEVELS), st.sampled_from(MODES))
def test_masked_slots_are_zero_and_never_matter(batch, level, mode):
    log_ratio, mask = torch.tensor(batch[0]), torch.tensor(batch[1])
    arguments = {"level": level, "mode": mode, "threshold": 1.5, "clip_to": 1.2}
    clean = importance_weights(log_ratio, mask, **arguments)
    for rubbish in (math.nan, math.inf, -math.inf, 1e30):
        dirty = importance_weights(torch.where(mask, log_ratio, rubbish), mask, **arguments)
        assert torch.equal(dirty, clean)
    assert (clean[~mask] == 0).all()
    assert torch.isfinite(clean).all()


@pytest.mark.parametrize("level", LEVELS)
def test_same_policy_weighs_one(level):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for mode in MODES:
        weights = importance_weights(torch.zeros(2, 3), mask, level=level, mode=mode, threshold=1.5, clip_to=1.2)
        assert torch.equal(weights, mask.float())


def test_the_rule_of_one_and_a_half_to_one_point_two():
    log_ratio = torch.tensor([[1.49, 1.51, 0.2]]).log()
    weights = importance_weights(
        log_ratio, torch.ones(1, 3, dtype=torch.bool), level="token", mode="clip_to", threshold=1.5, clip_to=1.2
    )
    torch.testing.assert_close(weights, torch.tensor([[1.49, 1.2, 0.2]]))


def test_sequence_is_the_product_and_geometric_its_root():
    ratios = torch.tensor([[1.2, 0.5, 2.0, 9.0], [0.9, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    arguments = {"mode": "truncate", "threshold": 100.0}
    sequence = importance_weights(ratios.log(), mask, level="sequence", **arguments)
    torch.testing.assert_close(sequence, torch.tensor([[1.2, 1.2, 1.2, 0.0], [0.9, 0.0, 0.0, 0.0]]))
    geometric = importance_weights(ratios.log(), mask, level="geometric", **arguments)
    torch.testing.assert_close(geometric[0, 0], torch.tensor(1.2 ** (1 / 3)))
    torch.testing.assert_close(geometric[1, 0], torch.tensor(0.9))


def test_mask_mode_with_explicit_bounds_includes_both_ends():
    log_ratio = torch.tensor([[0.25, 0.5, 1.0, 2.0, 4.0]]).log()
    weights = importance_weights(
        log_ratio, torch.ones(1, 5, dtype=torch.bool), level="token", mode="mask", threshold=(0.5, 2.0)
    )
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.5, 1.0, 2.0, 0.0]]))


def test_clamped_in_log_space_before_exp():
    mask = torch.ones(1, 3, dtype=torch.bool)
    log_ratio = torch.tensor([[500.0, -500.0, math.inf]])
    weights = importance_weights(log_ratio, mask, level="token", mode="truncate", threshold=1e30)
    torch.testing.assert_close(weights, torch.tensor([[math.exp(20), math.exp(-20), math.exp(20)]]))
    # The sum is clamped, not its parts: +30 and -30 cancel.
    pair = importance_weights(
        torch.tensor([[30.0, -30.0]]), mask[:, :2], level="sequence", mode="truncate", threshold=2.0
    )
    assert torch.equal(pair, torch.ones(1, 2))


def test_carries_no_gradient_and_is_float32():
    log_ratio = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    weights = importance_weights(
        log_ratio, torch.ones(1, 2, dtype=torch.bool), level="token", mode="truncate", threshold=1.5
    )
    assert not weights.requires_grad
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_nan_in_a_valid_slot_stays_visible(mode):
    weights = importance_weights(
        torch.tensor([[math.nan, 0.0]]),
        torch.ones(1, 2, dtype=torch.bool),
        level="token",
        mode=mode,
        threshold=1.5,
        clip_to=1.2,
    )
    assert torch.isnan(weights[0, 0])
    assert weights[0, 1] == 1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"level": "word"}, "level"),
        ({"mode": "cut"}, "mode"),
        ({"threshold": 0.0}, "threshold"),
        ({"threshold": math.nan}, "threshold"),
        ({"mode": "clip_to"}, "clip_to"),
        ({"mode": "clip_to", "clip_to": -1.0}, "clip_to"),
        ({"mode": "mask", "threshold": 0.5}, "at least 1"),
        ({"mode": "mask", "threshold": (2.0, 0.5)}, "low <= high"),
        ({"threshold": (0.5, 2.0)}, "mask"),
        ({"mask": torch.ones(1, 2)}, "bool"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, "shape"),
    ],
)
def test_wrong_arguments_are_named(changes, word):
    arguments = {"level": "token", "mode": "truncate", "threshold": 1.5, "mask": torch.ones(1, 2, dtype=torch.bool)}
    arguments |= changes
    with pytest.raises(ValueError, match=word):
        importance_weights(torch.zeros(1, 2), arguments.pop("mask"), **arguments)


@given(st.lists(st.floats(0.0, 1e6, width=32), min_size=1, max_size=20))
def test_effective_sample_fraction_equals_the_formula(values):
    found = float(effective_sample_fraction(torch.tensor(values)))
    squares = sum(value**2 for value in values)
    expected = sum(values) ** 2 / (len(values) * squares) if squares > 1e-200 else None
    if max(values) == 0:
        assert found == 0
    elif expected is not None and max(values) > 1e-30:
        assert found == pytest.approx(expected, rel=1e-4)
        assert 1 / len(values) * (1 - 1e-5) <= found <= 1


def test_effective_sample_fraction_limits():
    assert float(effective_sample_fraction(torch.full((4, 3), 0.3))) == pytest.approx(1.0)
    assert float(effective_sample_fraction(torch.tensor([1e38, 0.0, 0.0, 0.0]))) == pytest.approx(0.25)
    assert float(effective_sample_fraction(torch.zeros(3))) == 0
    assert float(effective_sample_fraction(torch.empty(0))) == 0
    assert float(effective_sample_fraction(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool))) == 0


@given(batches(), st.floats(0.01, 100.0))
def test_effective_sample_fraction_ignores_scale_order_and_masked_slots(batch, scale):
    weights, mask = torch.tensor(batch[0]).abs() + 0.1, torch.tensor(batch[1])
    found = effective_sample_fraction(torch.where(mask, weights, math.nan), mask)
    torch.testing.assert_close(found, effective_sample_fraction(weights[mask].flip(0) * scale), rtol=1e-4, atol=1e-6)


def test_effective_sample_fraction_counts_zero_weights():
    weights, mask = torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([[True, True, False]])
    assert float(effective_sample_fraction(weights, mask)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="shape"):
        effective_sample_fraction(weights, mask[:, :2])

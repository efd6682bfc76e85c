"""The KL coefficient: fixed, or following a target."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.objectives.cases import LAWS
from training.objectives import AdaptiveKLController, FixedKLController


@LAWS
@given(st.floats(0.0, 10.0), st.floats(1e-3, 1.0), st.integers(0, 400))
def test_one_update_by_formula_and_within_bounds(current: float, target: float, n_steps: int) -> None:
    controller = AdaptiveKLController(0.2, target, 400)
    controller.update(current, n_steps)
    error = max(-0.2, min(0.2, current / target - 1))
    assert controller.kl_coef == pytest.approx(0.2 * (1 + error * n_steps / 400), rel=1e-12)
    assert 0.2 * 0.8 <= controller.kl_coef <= 0.2 * 1.2 + 1e-15
    assert (controller.kl_coef > 0.2) <= (current > target)


def test_on_target_nothing_moves() -> None:
    controller = AdaptiveKLController(0.05, 0.1, 100)
    controller.update(0.1, 50)
    assert controller.kl_coef == 0.05


def test_it_settles_where_the_kl_meets_the_target() -> None:
    """A policy whose KL is 0.02 / coefficient has its target of 0.1 at a coefficient of 0.2."""
    controller = AdaptiveKLController(1.5, 0.1, 100)
    for _ in range(200):
        controller.update(0.02 / controller.kl_coef, 50)
    assert controller.kl_coef == pytest.approx(0.2, rel=1e-3)


def test_infinite_kl_counts_as_far_above() -> None:
    controller = AdaptiveKLController(0.1, 0.1, 100)
    controller.update(math.inf, 100)
    assert controller.kl_coef == pytest.approx(0.12)


def test_a_tensor_may_be_handed_in() -> None:
    controller = AdaptiveKLController(0.1, 0.1, 100)
    controller.update(torch.tensor(0.5), 100)
    assert isinstance(controller.kl_coef, float)


def test_fixed_stays() -> None:
    controller = FixedKLController(0.3)
    controller.update(99.0, 1000)
    assert controller.kl_coef == 0.3


@pytest.mark.parametrize("make", [lambda: FixedKLController(1.0), lambda: AdaptiveKLController(1.0, 0.1, 100)])
def test_state_round_trip_is_exact(make) -> None:
    adaptive = AdaptiveKLController(0.1, 0.07, 333)
    for step in range(17):
        adaptive.update(0.01 * step, 29)
    restored = make()
    restored.load_state_dict(adaptive.state_dict())
    assert restored.kl_coef == adaptive.kl_coef
    assert restored.state_dict() == adaptive.state_dict() == {"kl_coef": adaptive.kl_coef}


def test_a_resumed_controller_goes_on_as_if_nothing_had_happened() -> None:
    whole, first = AdaptiveKLController(0.1, 0.07, 333), AdaptiveKLController(0.1, 0.07, 333)
    kls = [0.01 * step for step in range(20)]
    for current in kls:
        whole.update(current, 31)
    for current in kls[:9]:
        first.update(current, 31)
    second = AdaptiveKLController(5.0, 0.07, 333)
    second.load_state_dict(first.state_dict())
    for current in kls[9:]:
        second.update(current, 31)
    assert second.kl_coef == whole.kl_coef


def test_wrong_values_are_refused() -> None:
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="kl_coef"):
            FixedKLController(bad)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="target_kl"):
            AdaptiveKLController(0.1, bad, 100)
        with pytest.raises(ValueError, match="horizon"):
            AdaptiveKLController(0.1, 0.1, bad)
    controller = AdaptiveKLController(0.1, 0.1, 100)
    with pytest.raises(ValueError, match="NaN"):
        controller.update(math.nan, 1)
    with pytest.raises(ValueError, match="n_steps"):
        controller.update(0.1, -1)
    with pytest.raises(ValueError, match="raise horizon"):
        controller.update(0.0, 501)
    for state in ({}, {"kl_coef": 0.1, "other": 1.0}, {"kl_coef": math.nan}, {"kl_coef": -1.0}):
        with pytest.raises(ValueError, match="kl_coef"):
            controller.load_state_dict(state)
    assert controller.kl_coef == 0.1

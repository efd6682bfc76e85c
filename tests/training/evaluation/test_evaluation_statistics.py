from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from training.errors import GateError
from training.evaluation.statistics import (
    kendall_tau,
    mean_with_interval,
    paired_difference,
    unpaired_difference,
    wilson_interval,
    win_points,
    win_rate,
)

scores = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=30)


def test_mean_with_interval():
    sample = np.random.default_rng(0).normal(2.0, 1.0, size=400)
    found = mean_with_interval(sample, seed=3)
    assert found.value == pytest.approx(sample.mean(), abs=1e-12)
    assert (found.n, found.confidence) == (400, 0.95)
    half = 1.96 * sample.std(ddof=1) / 20
    np.testing.assert_allclose([found.low, found.high], [found.value - half, found.value + half], atol=0.02)
    assert mean_with_interval(sample, seed=3) == found != mean_with_interval(sample, seed=4)


def test_pairing_removes_what_prompts_share():
    rng = np.random.default_rng(1)
    prompts = rng.normal(0, 10, size=100)
    ours, theirs = prompts + rng.normal(0.3, 0.1, size=100), prompts
    paired = paired_difference(ours, theirs, seed=0)
    unpaired = unpaired_difference(ours, theirs, seed=0)
    assert paired.value == pytest.approx(unpaired.value, abs=1e-12)
    assert 0.25 < paired.low < paired.value < paired.high < 0.35
    assert unpaired.low < -1
    assert unpaired.high > 1
    swapped = paired_difference(theirs, ours, seed=0)
    assert swapped.value == -paired.value


def test_unpaired_takes_samples_of_any_size_and_counts_the_smaller():
    found = unpaired_difference([1.0, 2.0, 3.0], [0.0] * 50, seed=0)
    assert (found.value, found.n) == (2.0, 3)
    alone = unpaired_difference([1.0], [0.0] * 50, seed=0)
    assert alone.n == 1
    assert math.isnan(alone.low)


def test_pairs_must_match():
    with pytest.raises(GateError, match=r"differ in length: 2 and 3"):
        paired_difference([1, 2], [1, 2, 3], seed=0)


@given(scores, st.data())
def test_win_rate_is_wins_plus_half_the_ties(ours, data):
    theirs = data.draw(st.lists(st.integers(-5, 5).map(float), min_size=len(ours), max_size=len(ours)))
    won = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(ours, theirs, strict=True))
    assert win_rate(ours, theirs) == pytest.approx(won / len(ours))
    assert win_rate(ours, theirs) + win_rate(theirs, ours) == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_neither_won_nor_lost(wrong):
    np.testing.assert_array_equal(win_points([1.0, wrong, 3.0], [0.0, 0.0, wrong]), [1.0, math.nan, math.nan])
    assert math.isnan(win_rate([wrong, 1.0], [wrong, 0.0]))


@pytest.mark.parametrize(("wins", "n"), itertools.product([0, 1, 15, 29, 30], [30]))
def test_wilson_is_scipys(wins, n):
    for level in (0.8, 0.95):
        theirs = stats.binomtest(wins, n).proportion_ci(level, method="wilson")
        np.testing.assert_allclose(wilson_interval(wins / n, n, level), theirs, atol=1e-12)


def test_wilson_does_not_claim_certainty_from_few():
    low, high = wilson_interval(1.0, 30)
    assert low < 0.9
    assert high == 1.0
    assert all(math.isnan(bound) for n, share in ((1, 1.0), (30, math.nan)) for bound in wilson_interval(share, n))


@given(scores)
def test_kendall_against_counting_pairs(ours):
    theirs = [x * x - x for x in ours]
    concordant = discordant = ties_ours = ties_theirs = 0
    for (a, b), (c, d) in itertools.combinations(zip(ours, theirs, strict=True), 2):
        sign = (a - c) * (b - d)
        concordant += sign > 0
        discordant += sign < 0
        ties_ours += a == c
        ties_theirs += b == d
    pairs = len(ours) * (len(ours) - 1) / 2
    scale = math.sqrt((pairs - ties_ours) * (pairs - ties_theirs))
    found = kendall_tau(ours, theirs)
    if scale == 0:
        assert math.isnan(found)
    else:
        assert found == pytest.approx((concordant - discordant) / scale)


def test_kendall_does_not_rank_nan():
    assert math.isnan(kendall_tau([1.0, math.nan, 2.0], [1.0, 2.0, 3.0]))

"""The bootstrap against slow oracles, its coverage, its laws, and planted bugs that break them."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from training.errors import GateError
from training.evaluation import bootstrap as real_bootstrap
from training.evaluation.bootstrap import Bootstrap, as_sample, generator

LEVELS = (0.8, 0.95, 0.99)


def mean(means):
    return means[..., 0]


def difference(means):
    return means[..., 0] - means[..., 1]


def slow_bca(sample, replicates, level):
    """Efron & Tibshirani (1993), eq. 14.9, 14.10, 14.14, 14.15 for the mean, number by number."""
    normal, n, value = NormalDist(), len(sample), sum(sample) / len(sample)
    below = sum(1.0 if r < value else 0.5 if r == value else 0.0 for r in replicates) / len(replicates)
    z0 = normal.inv_cdf(min(max(below, 0.5 / len(replicates)), 1 - 0.5 / len(replicates)))
    left_out = [sum(x for j, x in enumerate(sample) if j != i) / (n - 1) for i in range(n)]
    middle = sum(left_out) / n
    cubes, squares = sum((middle - x) ** 3 for x in left_out), sum((middle - x) ** 2 for x in left_out)
    a = cubes / (6 * squares**1.5) if squares > 0 else 0.0
    bounds = []
    for tail in ((1 - level) / 2, 1 - (1 - level) / 2):
        z = normal.inv_cdf(tail)
        share = normal.cdf(z0 + (z0 + z) / (1 - a * (z0 + z)))
        bounds.append(float(np.quantile(replicates, share)))
    return min(bounds[0], value), max(bounds[1], value)


def law_bca_is_the_book(module):
    rng = np.random.default_rng(3)
    samples = rng.exponential(size=15), rng.normal(size=40), np.round(rng.normal(size=25), 0), -rng.gamma(0.3, size=12)
    for sample in samples:
        drawn = module.Bootstrap.draw(sample[:, None], module.generator(0, "book"), 400)
        for level, found in zip(LEVELS, drawn.intervals(mean, LEVELS), strict=True):
            np.testing.assert_allclose(found, slow_bca(list(sample), list(drawn.resampled[:, 0]), level), atol=1e-12)


def law_pairs_stay_pairs(module):
    """The change of a constant has no spread, however much the pair itself varies."""
    noisy = np.random.default_rng(4).normal(0, 100, size=50)
    drawn = module.Bootstrap.draw(np.stack([noisy + 0.5, noisy], axis=1), module.generator(0, "pairs"), 300)
    np.testing.assert_allclose(drawn.intervals(difference, LEVELS), 0.5, atol=1e-10)


def law_two_samples_agree_with_scipy(module):
    first, second = np.random.default_rng(5).exponential(size=60), np.exp(np.linspace(-2, 3, 14))
    ours = [module.Bootstrap.draw(s[:, None], module.generator(1, str(s.size)), 20_000) for s in (first, second)]
    value, bounds = module.unpaired_intervals(*ours, mean, [0.95])
    theirs = stats.bootstrap(
        (first, second), lambda a, b, axis: a.mean(axis) - b.mean(axis), n_resamples=20_000, method="BCa",
        rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    assert value == first.mean() - second.mean()
    np.testing.assert_allclose(bounds[0], theirs, atol=0.03 * (theirs.high - theirs.low))


def law_wider_levels_hold_narrower_ones_and_the_value(module):
    """Strong skew, where the adjustment is strongest."""
    rng = np.random.default_rng(6)
    for n in (3, 5, 8):
        for _ in range(30):
            sample = rng.pareto(0.4, size=n)
            drawn = module.Bootstrap.draw(sample[:, None], module.generator(0, "skew"), 200)
            bounds = drawn.intervals(mean, [0.01, 0.5, 0.9, 0.999, 0.999999])
            lows, highs = [low for low, _ in bounds], [high for _, high in bounds]
            assert lows == sorted(lows, reverse=True)
            assert highs == sorted(highs)
            assert lows[0] <= drawn.value(mean) <= highs[0]


LAWS = [law for name, law in sorted(globals().items()) if name.startswith("law_")]
BUGS = {
    "the bias is corrected once": ("return _NORMAL.cdf(bias + shifted / bend)", "return _NORMAL.cdf(shifted / bend)"),
    "the acceleration has the wrong sign": ("/ (6 * np.sum(scaled**2)", "/ (-6 * np.sum(scaled**2)"),
    "one tail takes all": ("((1 - level) / 2, (1 + level) / 2)", "(1 - level, level)"),
    "ties count as above": ("0.5 * np.sum(replicates == value)", "0.0 * np.sum(replicates == value)"),
    "columns draw their own rows": (
        "columns[rows, column]",
        "columns[rng.integers(0, n, size=rows.shape), column]",
    ),
    "rows are not replaced": ("rng.integers(0, n, size=(min(step, resamples - start), n))",
                              "rng.permuted(np.tile(np.arange(n), (min(step, resamples - start), 1)), axis=1)"),
    "the second sample pulls the wrong way": ("-_influence(statistic(second", "_influence(statistic(second"),
    "the value may lie outside": ("(min(value, float(low)), max(value, float(high)))",
                     "(float(low), float(high))"),
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("law_"))
def test_law(law):
    law(real_bootstrap)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_breaks_a_law(bug, with_bugs):
    name = "training.evaluation.bootstrap"
    with with_bugs([name], {name: BUGS[bug]}) as copies:
        for law in LAWS:
            try:
                law(copies[name])
            except AssertionError:
                return
    pytest.fail(f"no law noticed: {bug}")


@pytest.mark.parametrize(("draw", "truth"), [("normal", 0.0), ("exponential", 1.0)])
def test_intervals_cover_the_truth_as_often_as_they_say(draw, truth):
    """400 samples of 40: a 90 % interval holds the true mean in 84 to 94 % (binomial noise, and a small-n loss)."""
    rng = np.random.default_rng(7)
    low_misses = high_misses = 0
    for _ in range(400):
        drawn = Bootstrap.draw(getattr(rng, draw)(size=(40, 1)), rng, 400)
        low, high = drawn.intervals(mean, [0.9])[0]
        low_misses += truth < low
        high_misses += truth > high
    assert 24 <= low_misses + high_misses <= 64
    # both tails must carry misses: a one-sided interval would still cover
    assert min(low_misses, high_misses) >= 8


def test_agrees_with_scipy_on_a_ratio():
    rng = np.random.default_rng(8)
    tokens = rng.integers(5, 60, size=80).astype(float)
    columns = np.stack([tokens * rng.gamma(2.0, 0.1, size=80), tokens], axis=1)
    ours = Bootstrap.draw(columns, generator(0, "ratio"), 20_000).intervals(lambda m: m[..., 0] / m[..., 1], [0.95])[0]
    theirs = stats.bootstrap(
        (columns[:, 0], columns[:, 1]), lambda a, b, axis: a.mean(axis) / b.mean(axis), paired=True, vectorized=True,
        n_resamples=20_000, method="BCa", rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    np.testing.assert_allclose(ours, theirs, atol=0.03 * (theirs.high - theirs.low))


def test_same_name_same_draw_and_another_name_another():
    sample = np.random.default_rng(9).normal(size=(30, 1))
    first, again, other = (Bootstrap.draw(sample, generator(1, name), 50) for name in ("reward", "reward", "kl"))
    np.testing.assert_array_equal(first.resampled, again.resampled)
    assert not np.array_equal(first.resampled, other.resampled)
    assert not np.array_equal(first.resampled, Bootstrap.draw(sample, generator(2, "reward"), 50).resampled)


def test_chunks_do_not_change_what_is_drawn(monkeypatch):
    sample = np.random.default_rng(10).normal(size=(30, 2))
    whole = Bootstrap.draw(sample, generator(1, "x"), 50)
    monkeypatch.setattr(real_bootstrap, "_CHUNK", 7 * 30)
    np.testing.assert_array_equal(whole.resampled, Bootstrap.draw(sample, generator(1, "x"), 50).resampled)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.data(),
)
def test_what_is_not_finite_is_never_hidden(sample, wrong, data):
    sample.insert(data.draw(st.integers(0, len(sample))), wrong)
    drawn = Bootstrap.draw(np.array(sample)[:, None], generator(0, "wrong"), 20)
    assert not math.isfinite(drawn.value(mean))
    assert all(math.isnan(bound) for bounds in drawn.intervals(mean, LEVELS) for bound in bounds)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=12))
def test_any_finite_sample_has_an_interval_or_says_it_has_none(sample):
    drawn = Bootstrap.draw(np.array(sample)[:, None], generator(0, "any"), 40)
    low, high = drawn.intervals(mean, [0.95])[0]
    assert math.isnan(low) == math.isnan(high)
    assert math.isnan(low) or low <= drawn.value(mean) <= high


def test_one_sample_has_no_interval_and_equal_samples_a_point():
    alone = Bootstrap.draw(np.array([[1.5]]), generator(0, "one"), 10)
    assert alone.value(mean) == 1.5
    assert all(math.isnan(bound) for bound in alone.intervals(mean, [0.95])[0])
    equal = Bootstrap.draw(np.full((20, 1), 0.25), generator(0, "equal"), 50)
    assert equal.intervals(mean, [0.95]) == [(0.25, 0.25)]


def test_very_small_numbers_keep_their_interval():
    drawn = Bootstrap.draw(np.random.default_rng(0).exponential(1e-180, size=(20, 1)), generator(0, "small"), 200)
    low, high = drawn.intervals(mean, [0.95])[0]
    assert 0 < low < high < 1e-179


@pytest.mark.parametrize("values", [[], [[1.0, 2.0]], ["a"], 3.0, [1.0, None, [2]]])
def test_what_is_not_a_sample_is_refused_by_name(values):
    with pytest.raises(GateError, match="metric reward"):
        as_sample(values, "metric reward")

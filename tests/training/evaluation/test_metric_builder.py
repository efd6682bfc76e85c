"""From per-prompt values to metrics: numbers, pairing, slices, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training.errors import GateError
from training.evaluation.metric_builder import MetricBuilder, RatioValues, build_metric, exact_metric, values_digest
from training.evaluation.prompt_slices import length_buckets, slice_members

N = 120


@pytest.fixture(scope="module")
def scores():
    rng = np.random.default_rng(0)
    reference = rng.normal(-0.2, 1.0, size=N)
    champion = reference + rng.normal(0.1, 0.3, size=N)
    return {"challenger": champion + rng.normal(0.2, 0.3, size=N), "champion": champion, "reference": reference}


def test_values_are_plain_means_and_differences(scores):
    metric = build_metric("reward", *scores.values(), seed=1, confidence=(0.99, 0.9))
    overall = metric.overall
    for model, values in scores.items():
        assert getattr(overall, model).value == pytest.approx(values.mean())
        assert getattr(overall, model).values_digest == values_digest(values[:, None])
    assert overall.versus_champion.value == pytest.approx((scores["challenger"] - scores["champion"]).mean())
    assert overall.versus_reference.value == pytest.approx((scores["challenger"] - scores["reference"]).mean())
    assert overall.challenger.n == overall.versus_reference.n == N
    assert [i.confidence for i in overall.versus_champion.intervals] == [0.9, 0.99]
    # pairing: the change is known far better than either side
    alone, paired = overall.challenger.interval(0.9), overall.versus_champion.interval(0.9)
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)
    assert paired.low > 0


def test_same_seed_same_report_whatever_else_is_measured(scores):
    one = MetricBuilder(seed=1).mean("reward", *scores.values())
    builder = MetricBuilder(seed=1)
    builder.mean("other", scores["champion"])
    assert builder.mean("reward", *scores.values()) == one
    assert MetricBuilder(seed=2).mean("reward", *scores.values()) != one


def test_the_first_night_has_no_champion(scores):
    overall = build_metric("reward", scores["challenger"], None, scores["reference"], seed=1).overall
    assert overall.champion is None
    assert overall.versus_champion is None
    assert overall.versus_reference is not None


def test_slices_are_the_same_metric_on_part_of_the_prompts(scores):
    categories = ["sum" if i % 3 else "joke" for i in range(N)]
    slices = slice_members(category=categories) | {"source=never": np.zeros(N, dtype=bool)}
    metric = build_metric("reward", *scores.values(), seed=1, slices=slices)
    jokes = np.arange(N) % 3 == 0
    assert [part.name for part in metric.slices] == ["category=joke", "category=sum"]
    part = metric.slice("category=joke")
    assert part.challenger.n == jokes.sum()
    assert part.versus_champion.value == pytest.approx((scores["challenger"] - scores["champion"])[jokes].mean())
    assert metric.slice("source=never") is None


def test_a_slice_of_one_has_a_value_and_no_interval(scores):
    members = np.arange(N) == 7
    part = build_metric("reward", *scores.values(), seed=1, slices={"category=rare": members}).slice("category=rare")
    assert part.challenger.value == scores["challenger"][7]
    assert part.challenger.intervals == part.versus_champion.intervals == ()


def test_ratio_weighs_by_the_denominator():
    tokens = np.array([1.0, 9.0] * 20)
    kl = RatioValues(tokens * np.array([1.0, 0.0] * 20), tokens)
    metric = MetricBuilder(seed=0).ratio("kl_ref", kl, unit="nats")
    assert metric.overall.challenger.value == pytest.approx(0.1)
    assert metric.unit == "nats"
    interval = metric.overall.challenger.interval(0.95)
    assert 0 < interval.low < 0.1 < interval.high < 0.3


def test_perplexity_is_the_exponential_of_the_mean_loss():
    rng = np.random.default_rng(1)
    tokens = rng.integers(4, 40, size=60).astype(float)
    better, worse = (RatioValues(tokens * rng.gamma(40, mean / 40, size=60), tokens) for mean in (2.0, 2.3))
    metric = MetricBuilder(seed=0).ratio("perplexity", worse, better, better, transform=np.exp).overall
    assert metric.challenger.value == pytest.approx(math.exp(np.sum(worse.numerators) / tokens.sum()))
    assert metric.versus_champion.value == pytest.approx(metric.challenger.value - metric.champion.value)
    assert metric.versus_champion == metric.versus_reference
    assert metric.versus_champion.interval(0.95).low > 0


def test_win_rate_counts_ties_half_and_is_never_certain():
    metric = MetricBuilder(seed=0).win_rate("win_rate", [1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 5.0, 1.0])
    assert metric.overall.challenger.value == 0.625
    sure = MetricBuilder(seed=0).win_rate("win_rate", np.ones(30), np.zeros(30)).overall.challenger
    assert sure.value == 1.0
    assert sure.interval(0.95).low < 0.9


def test_gap_compares_different_prompts():
    rng = np.random.default_rng(2)
    metric = MetricBuilder(seed=0).gap("reward_gap", rng.normal(0.5, 0.1, size=300), rng.normal(0.4, 0.1, size=80))
    found = metric.overall.challenger
    assert found.value == pytest.approx(0.1, abs=0.03)
    assert found.n == 80
    assert 0.06 < found.interval(0.95).low < found.value < found.interval(0.95).high < 0.14


def test_exact_metrics_have_differences_and_no_interval():
    overall = exact_metric("accuracy", 0.8, 0.75, n=50).overall
    assert overall.versus_champion.value == pytest.approx(0.05)
    assert overall.reference is None
    assert overall.challenger.intervals == ()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_seen_everywhere_it_counts(scores, wrong):
    broken = scores["champion"].copy()
    broken[3] = wrong
    overall = build_metric("reward", scores["challenger"], broken, scores["reference"], seed=0).overall
    assert math.isfinite(overall.challenger.value)
    assert overall.challenger.nonfinite == overall.versus_reference.nonfinite == 0
    for estimate in (overall.champion, overall.versus_champion):
        assert not math.isfinite(estimate.value)
        assert estimate.nonfinite == 1
        assert math.isnan(estimate.intervals[0].low)
    # two that would cancel are no better
    both = scores["challenger"].copy()
    both[:2] = [math.inf, -math.inf]
    assert math.isnan(build_metric("reward", both, seed=0).overall.challenger.value)


def test_a_win_is_not_claimed_over_a_broken_champion(scores):
    broken = scores["champion"].copy()
    broken[3] = math.nan
    assert math.isnan(MetricBuilder(seed=0).win_rate("win_rate", scores["challenger"], broken).overall.challenger.value)


def test_digests_tell_values_apart():
    assert values_digest(np.array([0.0, math.nan])) == values_digest(np.array([-0.0, -math.nan]))
    assert values_digest(np.array([1.0, 2.0])) != values_digest(np.array([2.0, 1.0]))
    assert values_digest(np.array([1.0])) != values_digest(np.array([1.0 + 1e-15]))


def test_values_of_other_prompts_are_refused(scores):
    with pytest.raises(GateError, match=r"metric reward: values are not of the same prompts.*119"):
        build_metric("reward", scores["challenger"], scores["champion"][1:], seed=0)
    with pytest.raises(GateError, match=r"metric kl, challenger\.denominators"):
        MetricBuilder(seed=0).ratio("kl", RatioValues([1.0], []))
    for members in (np.ones(3, dtype=bool), np.ones(N)):
        with pytest.raises(GateError, match="slice category=x needs one true or false a prompt"):
            build_metric("reward", scores["challenger"], seed=0, slices={"category=x": members})


def test_slice_members_label_by_label():
    found = slice_members(category=["b", "a", "", "b "], source=["hh"] * 4)
    assert list(found) == ["category=a", "category=b", "source=hh"]
    np.testing.assert_array_equal(found["category=b"], [True, False, False, True])
    assert found["source=hh"].all()
    with pytest.raises(GateError, match="one label a prompt"):
        slice_members(category=["a"], source=["a", "b"])


def test_length_buckets_are_thirds_and_equal_lengths_share_one():
    buckets = length_buckets(list(range(9)))
    assert buckets == ["short"] * 3 + ["medium"] * 3 + ["long"] * 3
    assert length_buckets([5, 5, 5]) == ["short"] * 3
    assert length_buckets([]) == []

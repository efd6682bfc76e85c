"""preference_filter_weights and filter_reliability: definition, ties, groups of one, generators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from training.errors import DataError
from training.replay.filter import filter_reliability, preference_filter_weights

METHODS = ("none", "best_random", "best_worst", "power")


@st.composite
def grouped(draw):
    size = draw(st.integers(1, 25))
    groups = draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size))
    scores = draw(st.lists(st.integers(-4, 4), min_size=size, max_size=size))
    return torch.tensor(scores, dtype=torch.float32), torch.tensor(groups)


def rows_of(groups, group):
    return [row for row, found in enumerate(groups.tolist()) if found == group]


@given(grouped())
def test_best_worst_keeps_the_extremes_of_each_group(case):
    scores, groups = case
    weights = preference_filter_weights(scores, groups, "best_worst")
    for group in set(groups.tolist()):
        rows = rows_of(groups, group)
        kept = [row for row in rows if weights[row] == 1]
        best = max(rows, key=lambda row: (scores[row].item(), -row))  # earliest of equals
        worst = min(rows, key=lambda row: (scores[row].item(), -row))  # latest of equals
        assert sorted({best, worst}) == kept
        assert len(kept) == min(2, len(rows))
        assert all(weights[row] in (0, 1) for row in rows)


@given(grouped(), st.integers(0, 1_000))
def test_best_random_keeps_the_best_and_one_other(case, seed):
    scores, groups = case
    generator = torch.Generator().manual_seed(seed)
    weights = preference_filter_weights(scores, groups, "best_random", generator=generator)
    for group in set(groups.tolist()):
        rows = rows_of(groups, group)
        kept = [row for row in rows if weights[row] == 1]
        assert max(rows, key=lambda row: (scores[row].item(), -row)) in kept
        assert len(kept) == min(2, len(rows))


@given(grouped(), st.sampled_from([0.5, 1.0, 2.0, 3.0]))
def test_power_is_the_centred_score(case, power):
    scores, groups = case
    weights = preference_filter_weights(scores, groups, "power", power)
    for row in range(len(scores)):
        mean = np.mean([scores[other].item() for other in rows_of(groups, groups[row].item())])
        assert weights[row].item() == pytest.approx(abs(scores[row].item() - mean) ** power, rel=1e-4, abs=1e-3)


@given(grouped(), st.sampled_from(["best_worst", "power"]))
def test_groups_never_see_each_other(case, method):
    scores, groups = case
    together = preference_filter_weights(scores, groups, method)
    for group in set(groups.tolist()):
        alone = preference_filter_weights(scores[groups == group], groups[groups == group], method)
        torch.testing.assert_close(together[groups == group], alone)


@given(grouped())
def test_none_keeps_all(case):
    assert (preference_filter_weights(*case, "none") == 1).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_one(method):
    weights = preference_filter_weights(torch.tensor([3.0]), torch.tensor([7]), method)
    assert weights.tolist() == ([0.0] if method == "power" else [1.0])


def test_a_group_of_equal_scores_has_power_zero_exactly():
    scores = torch.full((3,), 0.1)
    assert preference_filter_weights(scores, torch.zeros(3, dtype=torch.long), "power", 0.5).tolist() == [0, 0, 0]
    weights = preference_filter_weights(scores, torch.zeros(3, dtype=torch.long), "best_worst")
    assert weights.tolist() == [1, 0, 1]


def test_power_survives_a_large_offset():
    scores = torch.tensor([10_000.0, 10_001.0])
    weights = preference_filter_weights(scores, torch.tensor([1, 1]), "power")
    torch.testing.assert_close(weights, torch.tensor([0.25, 0.25]))


def test_random_choice_is_even_among_the_others():
    generator = torch.Generator().manual_seed(3)
    scores, groups = torch.tensor([0.0, 9.0, 1.0, 2.0, 3.0]), torch.zeros(5, dtype=torch.long)
    counts = torch.zeros(5)
    for _ in range(2_000):
        counts += preference_filter_weights(scores, groups, "best_random", generator=generator)
    assert counts[1] == 2_000
    others = counts[[0, 2, 3, 4]].numpy()
    assert others.sum() == 2_000
    assert stats.chisquare(others).pvalue > 1e-4


def test_the_global_generator_is_left_alone_and_the_run_s_own_is_resumable():
    scores, groups = torch.randn(40, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    first = preference_filter_weights(scores, groups, "best_random", generator=generator)
    second = preference_filter_weights(scores, groups, "best_random", generator=generator)
    assert not torch.equal(first, second)
    generator.set_state(state)
    assert torch.equal(first, preference_filter_weights(scores, groups, "best_random", generator=generator))
    by_content = preference_filter_weights(scores, groups, "best_random")
    assert torch.equal(by_content, preference_filter_weights(scores, groups, "best_random"))
    assert torch.equal(before, torch.get_rng_state())


def test_prompt_ids_may_be_strings_and_scores_half_precision():
    scores = torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.bfloat16)
    weights = preference_filter_weights(scores, ["a", "b", "b", "b"], "best_worst")
    assert weights.tolist() == [1, 0, 1, 1]
    assert weights.dtype == torch.float32
    assert preference_filter_weights(torch.empty(0), [], "best_worst").shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_cannot_be_ranked_is_named(bad):
    with pytest.raises(DataError, match="trajectory 1"):
        preference_filter_weights(torch.tensor([0.0, bad]), torch.tensor([0, 0]), "best_worst")


def test_wrong_arguments():
    scores, groups = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="best_only"):
        preference_filter_weights(scores, groups, "best_only")
    with pytest.raises(ValueError, match="shape"):
        preference_filter_weights(scores, groups[:1], "none")
    with pytest.raises(ValueError, match="power"):
        preference_filter_weights(scores, groups, "power", -1.0)


@given(st.integers(0, 10_000), st.integers(3, 30))
def test_reliability_is_the_r_squared_of_the_weighted_line(seed, size):
    generator = np.random.default_rng(seed)
    score, gold = generator.normal(size=size), generator.normal(size=size)
    weight = generator.random(size) * (generator.random(size) < 0.8)
    weight[:2] = 1.0
    found = filter_reliability(*(torch.tensor(x) for x in (score, gold, weight)))
    root = np.sqrt(weight)
    design = np.stack([np.ones(size), score], axis=1)
    fit = np.linalg.lstsq(design * root[:, None], gold * root, rcond=None)[0]
    mean = np.average(gold, weights=weight)
    residual, total = weight @ (gold - design @ fit) ** 2, weight @ (gold - mean) ** 2
    assert float(found) == pytest.approx(1 - residual / total, abs=1e-5)
    assert found.shape == ()


def test_reliability_limits():
    score, ones = torch.tensor([1.0, 2.0, 4.0]), torch.ones(3)
    assert float(filter_reliability(score, -2 * score + 1, ones)) == pytest.approx(1.0)
    assert float(filter_reliability(score, ones, ones)) == 0
    assert float(filter_reliability(ones, score, ones)) == 0
    assert float(filter_reliability(score, score, torch.zeros(3))) == 0
    unknown = torch.tensor([1.0, 2.0, math.nan])
    assert float(filter_reliability(score, unknown, torch.tensor([1.0, 1.0, 0.0]))) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="negative"):
        filter_reliability(score, score, -ones)
    with pytest.raises(ValueError, match="shape"):
        filter_reliability(score, score[:2], ones)


def test_filtering_the_extremes_is_more_reliable_when_the_middle_is_noise():
    """The finding that the method rests on: rank noise hurts least at the ends."""
    generator = torch.Generator().manual_seed(0)
    gold = torch.randn(4_000, generator=generator)
    score = gold + 0.7 * torch.randn(4_000, generator=generator)
    groups = torch.arange(4_000) // 8
    every = filter_reliability(score, gold, preference_filter_weights(score, groups, "none"))
    ends = filter_reliability(score, gold, preference_filter_weights(score, groups, "best_worst"))
    assert float(ends) > float(every) + 0.05

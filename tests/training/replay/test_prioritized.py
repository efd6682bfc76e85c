"""PrioritizedSampler: frequencies, weights by formula, capacity, eviction, exact resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from training.errors import CheckpointError
from training.replay.prioritized import PrioritizedSampler


def sampler_of(capacity=10, **changes):
    return PrioritizedSampler(capacity, **({"beta_steps": 10, "eps": 0.01, "seed": 0} | changes))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_frequencies_follow_the_priorities(alpha):
    sampler = sampler_of(40, alpha=alpha, seed=7)
    sampler.add(30)
    errors = np.random.default_rng(1).normal(size=30) * 3
    sampler.update(np.arange(30), errors)
    drawn = np.concatenate([sampler.sample(64)[0] for _ in range(500)])
    mass = (np.abs(errors) + 0.01) ** alpha
    counts = np.bincount(drawn, minlength=40)
    assert counts[30:].sum() == 0
    assert stats.chisquare(counts[:30], len(drawn) * mass / mass.sum()).pvalue > 1e-3


def test_chi_square_at_full_size():
    sampler = sampler_of(50_000, seed=11)
    sampler.add(50_000)
    errors = np.random.default_rng(2).gamma(0.5, size=50_000)
    sampler.update(np.arange(50_000), errors)
    drawn = np.concatenate([sampler.sample(64)[0] for _ in range(3_000)])
    mass = (errors + 0.01) ** 0.6
    expected, _ = np.histogram(np.arange(50_000), bins=100, weights=mass / mass.sum() * len(drawn))
    counts, _ = np.histogram(drawn, bins=100, range=(0, 49_999))
    assert stats.chisquare(counts, expected).pvalue > 1e-3


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.floats(0, 2), st.floats(0, 1), st.integers(0, 99))
def test_weights_by_formula(errors, alpha, beta, seed):
    sampler = sampler_of(40, alpha=alpha, beta_start=beta, beta_end=beta, seed=seed)
    sampler.add(len(errors))
    sampler.update(np.arange(len(errors)), errors)
    indices, weights = sampler.sample(8)
    mass = (np.abs(errors) + 0.01) ** alpha
    probability = mass / mass.sum()
    expected = (len(errors) * probability[indices]) ** -beta
    np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-5)
    np.testing.assert_allclose(sampler.probabilities()[: len(errors)], probability, rtol=1e-9)
    assert weights.max() == 1
    assert weights.dtype == np.float32
    assert indices.dtype == np.int64


def test_weighted_estimate_is_unbiased_at_beta_one():
    sampler = sampler_of(20, beta_start=1.0, seed=5)
    sampler.add(20)
    errors = np.linspace(0.1, 4, 20)
    sampler.update(np.arange(20), errors)
    values = np.cos(np.arange(20.0))
    indices, weights = sampler.sample(200_000)
    assert np.average(values[indices], weights=weights) == pytest.approx(values.mean(), abs=0.02)


def test_beta_anneals_over_the_samples():
    sampler = sampler_of(beta_start=0.4, beta_end=1.0, beta_steps=3)
    sampler.add(2)
    seen = []
    for _ in range(5):
        seen.append(sampler.beta)
        sampler.sample(1)
    np.testing.assert_allclose(seen, [0.4, 0.6, 0.8, 1.0, 1.0])


def test_new_slots_get_the_current_maximum():
    sampler = sampler_of()
    sampler.add(2)
    assert sampler.priorities()[:2].tolist() == [1.0, 1.0]
    sampler.update([0, 1], [0.5, -0.2])
    sampler.add(1)
    np.testing.assert_allclose(sampler.priorities()[:3], [0.51, 0.21, 0.51])
    sampler.remove([0, 2])
    sampler.add(1)
    assert sampler.priorities()[0] == pytest.approx(0.21)


def test_capacity_overwrites_the_oldest():
    sampler = sampler_of(4)
    assert sampler.add(3).tolist() == [0, 1, 2]
    assert sampler.add(3).tolist() == [3, 0, 1]
    assert sampler.add(2).tolist() == [2, 3]
    assert len(sampler) == 4
    sampler.remove([0, 3])
    assert len(sampler) == 2
    assert sampler.add(3).tolist() == [0, 3, 1]  # free ones first, then the oldest: 1 came before 2
    assert sampler.add(0).tolist() == []
    with pytest.raises(ValueError, match="capacity 4"):
        sampler.add(5)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "update"]), st.integers(0, 99)), max_size=40))
def test_slots_against_a_list(acts):
    """The same acts on a list that is kept in order of age."""
    sampler, ages, generator = sampler_of(6), [], np.random.default_rng(0)
    for act, number in acts:
        if act == "add":
            count = number % 7
            free = [slot for slot in range(6) if slot not in ages]
            expected = (free + ages)[:count]
            ages = [slot for slot in ages if slot not in expected] + expected
            assert sampler.add(count).tolist() == expected
        elif ages:
            slot = ages[number % len(ages)]
            if act == "remove":
                ages.remove(slot)
                sampler.remove([slot])
            else:
                sampler.update([slot], generator.normal(size=1))
        assert len(sampler) == len(ages)
        assert np.flatnonzero(sampler.probabilities()).tolist() == sorted(ages)
        if ages:
            assert set(sampler.sample(5)[0].tolist()) <= set(ages)


def test_extreme_priorities_never_draw_a_free_slot():
    sampler = sampler_of(5, alpha=1.0)
    sampler.add(5)
    sampler.update(np.arange(5), [1e150, 0, 1e-150, 1e150, 3])
    sampler.remove([4])
    indices, weights = sampler.sample(1_000)
    assert set(indices.tolist()) <= {0, 1, 2, 3}
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("point", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_a_draw_on_an_edge_lands_on_a_slot_in_use(point):
    class Fixed:
        def random(self, n):
            return np.full(n, point)

    sampler = sampler_of(6, alpha=1.0)
    sampler.add(6)
    sampler.update(np.arange(6), [7.0, 0.1, 7.0, 0.1, 0.7, 7.0])
    sampler.remove([0, 2, 5])
    sampler._generator = Fixed()
    assert sampler.sample(1)[0].tolist() == [1 if point == 0 else 4]


def test_filter_weights_multiply_the_mass():
    sampler = sampler_of(4, alpha=1.0, beta_start=1.0, eps=1e-9, seed=3)
    sampler.add(4)
    sampler.update(np.arange(4), [1.0, 2.0, 4.0, 8.0])
    indices, weights = sampler.sample(20_000, np.array([1.0, 2.0, 0.0, 0.5]))
    counts = np.bincount(indices, minlength=4)
    assert counts[2] == 0
    assert stats.chisquare(counts[[0, 1, 3]], 20_000 * np.array([1, 4, 4]) / 9).pvalue > 1e-3
    np.testing.assert_allclose(weights, (np.array([1.0, 2.0, 4.0, 8.0])[indices]) ** -1.0, rtol=1e-5)
    with pytest.raises(ValueError, match="filter leaves none"):
        sampler.sample(1, np.zeros(4))
    with pytest.raises(ValueError, match="filter weights"):
        sampler.sample(1, np.ones(3))


def test_resumes_bit_for_bit_through_json():
    first = sampler_of(50, seed=9)
    first.add(40)
    generator = np.random.default_rng(4)
    for _ in range(7):
        indices, _ = first.sample(16)
        first.update(indices, generator.normal(size=16))
    first.remove([3, 4])
    first.add(20)
    state = first.state_dict()
    through_json = json.loads(json.dumps(state, default=lambda array: array.tolist()))
    later = [sampler_of(50, seed=0), sampler_of(50, seed=1)]
    later[0].load_state_dict(state)
    later[1].load_state_dict(through_json)
    for _ in range(5):
        indices, weights = first.sample(16)
        errors, added = generator.normal(size=16), first.add(3)
        first.update(indices, errors)
        for other in later:
            other_indices, other_weights = other.sample(16)
            np.testing.assert_array_equal(indices, other_indices)
            np.testing.assert_array_equal(weights, other_weights)
            np.testing.assert_array_equal(added, other.add(3))
            other.update(indices, errors)
    np.testing.assert_array_equal(first.probabilities(), later[1].probabilities())


def test_a_state_is_a_copy():
    sampler = sampler_of()
    sampler.add(3)
    state = sampler.state_dict()
    sampler.update([0], [5.0])
    sampler.sample(3)
    assert state["priority"][0] == 1.0
    assert state["samples"] == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"capacity": 11},
        {"alpha": 0.5},
        {"priority": [1.0]},
        {"priority": [float("nan")] * 10},
        {"order": None},
        {"generator": {"bit_generator": "MT19937"}},
        {"samples": None},
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(damage):
    sampler = sampler_of()
    sampler.add(3)
    before = sampler.state_dict()
    with pytest.raises(CheckpointError, match="sampler state"):
        sampler.load_state_dict(before | damage)
    with pytest.raises(CheckpointError, match="sampler state"):
        sampler.load_state_dict({key: value for key, value in before.items() if key not in damage})
    after = sampler.state_dict()
    assert json.dumps(before, default=lambda a: a.tolist()) == json.dumps(after, default=lambda a: a.tolist())


def test_wrong_arguments():
    sampler = sampler_of()
    with pytest.raises(ValueError, match="nothing to draw"):
        sampler.sample(1)
    sampler.add(2)
    with pytest.raises(ValueError, match="not finite"):
        sampler.update([1], [np.nan])
    with pytest.raises(ValueError, match="slot 5 holds no"):
        sampler.update([5], [1.0])
    with pytest.raises(ValueError, match="outside"):
        sampler.remove([10])
    with pytest.raises(ValueError, match="outside"):
        sampler.remove([-1])
    with pytest.raises(ValueError, match="whole numbers"):
        sampler.remove([0.5])
    with pytest.raises(ValueError, match="TD errors of shape"):
        sampler.update([0, 1], [1.0])
    with pytest.raises(ValueError, match="cannot draw"):
        sampler.sample(0)
    for wrong in ({"capacity": 0}, {"beta_steps": 0}, {"eps": 0.0}, {"alpha": -1.0}):
        with pytest.raises(ValueError, match="must be"):
            sampler_of(**wrong)


def test_reset_forgets_everything_but_the_generator():
    sampler = sampler_of()
    sampler.add(4)
    sampler.sample(3)
    generator = sampler.state_dict()["generator"]
    sampler.reset()
    assert len(sampler) == 0
    assert sampler.beta == 0.4
    assert sampler.state_dict()["generator"] == generator
    assert sampler.add(1).tolist() == [0]

"""Laws of generalised advantage estimation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.objectives import oracles
from tests.training.objectives.cases import LAWS, Bools, Floats, bools, close, masks, normal, poisoned, seeds, tensor
from training.objectives import gae

unit = st.floats(0.0, 1.0)


def discounted_returns(rewards: Floats, mask: Bools, gamma: float) -> Floats:
    """Brute force: for each valid token, the discounted sum of the rewards of it and the valid ones after it."""
    out = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        positions = np.flatnonzero(mask[b])
        for i, t in enumerate(positions):
            out[b, t] = sum(gamma**k * rewards[b, later] for k, later in enumerate(positions[i:]))
    return out


def run(rewards: Floats, values: Floats, mask: Bools, gamma: float, lam: float) -> tuple[Floats, Floats]:
    advantages, returns = gae(tensor(rewards), tensor(values), bools(mask), gamma, lam)
    assert advantages.dtype == returns.dtype == torch.float32
    return advantages.double().numpy(), returns.double().numpy()


@LAWS
@given(masks(), seeds, unit, unit)
def test_any_mask_agrees_with_the_definition(mask: Bools, seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = (poisoned(rng, normal(rng, *mask.shape), mask) for _ in range(2))
    advantages, returns = run(rewards, values, mask, gamma, lam)
    expected = oracles.gae(rewards, values, mask, gamma, lam)
    close(advantages, expected[0], atol=1e-5)
    close(returns, expected[1], atol=1e-5)
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


@LAWS
@given(masks(), seeds, unit)
def test_lam_one_is_the_monte_carlo_return(mask: Bools, seed: int, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = normal(rng, *mask.shape), normal(rng, *mask.shape)
    advantages, returns = run(rewards, values, mask, gamma, 1.0)
    expected = discounted_returns(rewards, mask, gamma)
    close(returns, expected, atol=1e-5)
    close(advantages, np.where(mask, expected - values, 0), atol=1e-5)


@LAWS
@given(masks(), seeds, unit)
def test_lam_zero_is_the_one_step_error(mask: Bools, seed: int, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = normal(rng, *mask.shape), normal(rng, *mask.shape)
    advantages, _ = run(rewards, values, mask, gamma, 0.0)
    for b in range(mask.shape[0]):
        positions = np.flatnonzero(mask[b])
        following = np.append(values[b, positions[1:]], 0.0)[: len(positions)]
        close(advantages[b, positions], rewards[b, positions] + gamma * following - values[b, positions])


@LAWS
@given(masks(), seeds, unit)
def test_gamma_zero_sees_one_reward(mask: Bools, seed: int, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = normal(rng, *mask.shape), normal(rng, *mask.shape)
    advantages, returns = run(rewards, values, mask, 0.0, lam)
    close(advantages, np.where(mask, rewards - values, 0))
    close(returns, np.where(mask, rewards, 0))


@LAWS
@given(masks(), seeds, unit, unit)
def test_a_perfect_critic_leaves_no_advantage(mask: Bools, seed: int, gamma: float, lam: float) -> None:
    rewards = normal(np.random.default_rng(seed), *mask.shape)
    values = discounted_returns(rewards, mask, gamma)
    advantages, returns = run(rewards, values, mask, gamma, lam)
    close(advantages, np.zeros(mask.shape), atol=1e-5)
    close(returns, values, atol=1e-5)


@LAWS
@given(masks(max_rows=2), seeds, unit, unit)
def test_masked_positions_might_as_well_not_be_there(mask: Bools, seed: int, gamma: float, lam: float) -> None:
    """Squeezing out the holes, row by row, changes nothing: they neither discount nor cut."""
    rng = np.random.default_rng(seed)
    rewards, values = (poisoned(rng, normal(rng, *mask.shape), mask) for _ in range(2))
    advantages, returns = run(rewards, values, mask, gamma, lam)
    for b in range(mask.shape[0]):
        keep = mask[b]
        if keep.any():
            dense = run(rewards[b : b + 1, keep], values[b : b + 1, keep], mask[b : b + 1, keep], gamma, lam)
            assert np.array_equal(advantages[b, keep], dense[0][0])
            assert np.array_equal(returns[b, keep], dense[1][0])


@LAWS
@given(masks(), seeds, unit, unit)
def test_linear_in_rewards_and_values(mask: Bools, seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    one, two = ((normal(rng, *mask.shape), normal(rng, *mask.shape)) for _ in range(2))
    both, _ = run(one[0] + 2 * two[0], one[1] + 2 * two[1], mask, gamma, lam)
    close(both, run(*one, mask, gamma, lam)[0] + 2 * run(*two, mask, gamma, lam)[0], atol=2e-5)


@LAWS
@given(masks(), seeds)
def test_rows_do_not_see_each_other(mask: Bools, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = normal(rng, *mask.shape), normal(rng, *mask.shape)
    order = rng.permutation(mask.shape[0])
    advantages, returns = run(rewards, values, mask, 0.97, 0.9)
    shuffled = run(rewards[order], values[order], mask[order], 0.97, 0.9)
    assert np.array_equal(shuffled[0], advantages[order])
    assert np.array_equal(shuffled[1], returns[order])


def test_by_hand() -> None:
    """r = (1, 2), v = (0.5, 1), gamma 0.5, lam 0.5, with a hole: delta = (1 + 0.5 - 0.5, 2 - 1)."""
    mask = np.array([[True, False, True, False]])
    rewards, values = np.array([[1.0, np.nan, 2.0, np.nan]]), np.array([[0.5, np.nan, 1.0, np.inf]])
    advantages, returns = run(rewards, values, mask, 0.5, 0.5)
    assert advantages.tolist() == [[1.25, 0.0, 1.0, 0.0]]
    assert returns.tolist() == [[1.75, 0.0, 2.0, 0.0]]


def test_nan_in_a_valid_slot_is_not_hidden() -> None:
    advantages, _ = run(np.array([[0.0, np.nan, 0.0]]), np.zeros((1, 3)), np.ones((1, 3), dtype=bool), 1.0, 1.0)
    assert np.isnan(advantages).tolist() == [[True, True, False]]


def test_advantages_carry_no_gradient_and_inputs_are_left_alone() -> None:
    values = torch.ones(2, 3, requires_grad=True, dtype=torch.float64)
    rewards = torch.ones(2, 3, dtype=torch.bfloat16)
    advantages, returns = gae(rewards, values, torch.tensor([[True, True, False]] * 2), 1.0, 0.95)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert (values == 1).all()
    assert (rewards == 1).all()


def test_empty_batches() -> None:
    for shape in ((0, 3), (2, 0)):
        empty = torch.zeros(shape)
        advantages, returns = gae(empty, empty, empty.bool(), 1.0, 1.0)
        assert advantages.shape == returns.shape == shape


def test_wrong_inputs_are_refused() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match="response_mask must be bool"):
        gae(x, x, mask.long(), 1.0, 1.0)
    with pytest.raises(TypeError, match="values must be floating"):
        gae(x, x.long(), mask, 1.0, 1.0)
    with pytest.raises(ValueError, match="values has shape"):
        gae(x, x[:, :2], mask, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"\[B, R\]"):
        gae(x[0], x[0], mask[0], 1.0, 1.0)
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="gamma"):
            gae(x, x, mask, bad, 1.0)
        with pytest.raises(ValueError, match="lam"):
            gae(x, x, mask, 1.0, bad)

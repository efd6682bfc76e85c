"""Laws of the reward a token receives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.objectives import oracles
from tests.training.objectives.cases import LAWS, Bools, bools, close, masks, normal, poisoned, seeds, tensor
from training.objectives import token_level_rewards


@LAWS
@given(masks(), seeds, st.floats(-1.0, 1.0))
def test_any_mask_agrees_with_the_oracle(mask: Bools, seed: int, kl_coef: float) -> None:
    rng = np.random.default_rng(seed)
    scores, kl = normal(rng, mask.shape[0]), poisoned(rng, normal(rng, *mask.shape), mask)
    out = token_level_rewards(tensor(scores), bools(mask), tensor(kl), kl_coef)
    close(out, oracles.token_level_rewards(scores, mask, kl, kl_coef))
    assert (out[bools(~mask)] == 0).all()


@LAWS
@given(masks(), seeds)
def test_a_row_sums_to_its_score_minus_its_kl(mask: Bools, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, kl = normal(rng, mask.shape[0]), normal(rng, *mask.shape)
    out = token_level_rewards(tensor(scores), bools(mask), tensor(kl), 0.1)
    close(out.sum(-1), np.where(mask.any(1), scores - 0.1 * np.where(mask, kl, 0).sum(1), 0.0), atol=1e-5)


@LAWS
@given(masks(), seeds)
def test_padding_on_either_side_does_not_matter(mask: Bools, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, kl = normal(rng, mask.shape[0]), normal(rng, *mask.shape)
    reference = token_level_rewards(tensor(scores), bools(mask), tensor(kl), 0.5).double().numpy()
    pad = np.full((mask.shape[0], 3), np.nan)
    for left, right in ((pad, pad[:, :0]), (pad[:, :0], pad), (pad, pad)):
        wide = np.pad(mask, ((0, 0), (left.shape[1], right.shape[1])))
        out = token_level_rewards(tensor(scores), bools(wide), tensor(np.hstack([left, kl, right])), 0.5)
        close(out[:, left.shape[1] : left.shape[1] + mask.shape[1]], reference)


def test_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, False]])
    scores, kl = torch.tensor([2.0, torch.nan, -1.0]), torch.tensor([[0.5, 1.0, torch.nan]]).repeat(3, 1)
    close(token_level_rewards(scores, mask, kl, 0.2), [[-0.1, 1.8, 0.0], [0.0, 0.0, 0.0], [0.0, -1.2, 0.0]])
    close(token_level_rewards(scores, mask), [[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, -1.0, 0.0]])


def test_without_a_coefficient_the_kl_is_not_read() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    close(token_level_rewards(torch.tensor([1.0]), mask, torch.tensor([[math.inf, math.inf]]), 0.0), [[0.0, 1.0]])


def test_rewards_carry_no_gradient_and_are_float32() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    scores = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    out = token_level_rewards(scores, mask, torch.ones(2, 3, requires_grad=True), 0.1)
    assert not out.requires_grad
    assert out.dtype == torch.float32


def test_wrong_inputs_are_refused() -> None:
    mask, scores, kl = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2), torch.zeros(2, 3)
    with pytest.raises(TypeError, match="response_mask must be bool"):
        token_level_rewards(scores, mask.float())
    with pytest.raises(TypeError, match="scores must be floating"):
        token_level_rewards(scores.long(), mask)
    with pytest.raises(ValueError, match=r"scores must have shape \[B\]"):
        token_level_rewards(scores.unsqueeze(-1), mask)
    with pytest.raises(ValueError, match="3 scores for 2 rows"):
        token_level_rewards(torch.zeros(3), mask)
    with pytest.raises(ValueError, match="kl has shape"):
        token_level_rewards(scores, mask, kl[:, :2], 0.1)
    with pytest.raises(ValueError, match="kl_coef"):
        token_level_rewards(scores, mask, kl, math.nan)

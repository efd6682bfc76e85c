"""Generalised advantage estimation over the valid tokens of a response."""

from __future__ import annotations

import torch
from torch import Tensor

from training.objectives.checks import require_in_range, require_token_inputs
from training.objectives.masked import select


@torch.no_grad()
def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both [B, R] float32, 0 in masked slots.

    Shapes: token_level_rewards, values [B, R] floating, response_mask [B, R] bool; gamma and lam in [0, 1]. A masked
    position is skipped as if it were not there: it hands the next value and the running sum on untouched. The value
    after the last valid token is 0. Advantages are not whitened; returns = advantages + values. No gradient passes:
    both are targets. Raises TypeError, ValueError. Source: Schulman et al. 2015 (GAE), eq. 11 and 16.
    """
    require_token_inputs(response_mask, token_level_rewards=token_level_rewards, values=values)
    require_in_range("gamma", gamma, 0.0, 1.0)
    require_in_range("lam", lam, 0.0, 1.0)

    rewards = select(token_level_rewards, response_mask)
    values = select(values, response_mask)
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(rewards.shape[0])
    running = torch.zeros_like(next_value)
    for t in reversed(range(rewards.shape[1])):
        valid = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(valid, delta + gamma * lam * running, running)
        next_value = torch.where(valid, values[:, t], next_value)
        advantages[:, t] = running
    advantages = select(advantages, response_mask)
    return advantages, advantages + values

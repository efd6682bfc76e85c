"""From one score a trajectory to one reward a token."""

from __future__ import annotations

import torch
from torch import Tensor

from training.objectives.checks import require_floating, require_in_range, require_rank, require_token_inputs
from training.objectives.masked import select


@torch.no_grad()
def token_level_rewards(
    scores: Tensor, response_mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """The score on the last valid token, minus `kl_coef * kl` on each valid one.

    Shapes: scores [B], response_mask [B, R] bool, kl [B, R] in nats -> [B, R] float32. Valid tokens need not be
    contiguous. A row without valid tokens is 0 everywhere, its score included. With `kl_coef` 0 the KL is not read. No
    gradient passes: a reward is data. Raises TypeError, ValueError. Source: Ziegler et al. 2019, eq. 2; Ouyang et al.
    2022.
    """
    require_token_inputs(response_mask)
    require_floating(scores=scores)
    require_rank(1, "[B]", scores=scores)
    if scores.shape[0] != response_mask.shape[0]:
        raise ValueError(f"{scores.shape[0]} scores for {response_mask.shape[0]} rows of response_mask")
    require_in_range("kl_coef", kl_coef)

    rewards = select(scores.unsqueeze(-1), last_valid(response_mask))
    if kl is not None:
        require_token_inputs(response_mask, kl=kl)
        if kl_coef != 0:
            rewards = rewards - kl_coef * select(kl, response_mask)
    return rewards


def last_valid(response_mask: Tensor) -> Tensor:
    """[B, R] bool -> [B, R] bool: True at the last valid token of each row that has one."""
    valid_from_here = response_mask.flip(-1).cumsum(-1).flip(-1)
    return response_mask & (valid_from_here == 1)

"""The critic's clipped squared error."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from training.objectives.aggregate import aggregate, weighted
from training.objectives.checks import Count, require_positive, require_token_inputs
from training.objectives.masked import select
from training.objectives.value_fit import value_fit


class ValueLoss(NamedTuple):
    """0-d float32 tensors; only `loss` has a gradient."""

    loss: Tensor
    clip_frac: Tensor
    """Share of valid tokens where the clipped error is the larger one. Adds up over microbatches, as the loss does."""
    explained_variance: Tensor
    """Of this batch alone, and no mean: over microbatches merge `value_fit` instead of averaging."""


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float | None = 0.5,
    weights: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
) -> ValueLoss:
    """0.5 * max((v - R)^2, (clip(v, old - c, old + c) - R)^2), aggregated.

    Shapes: values, old_values, returns [B, R] floating, response_mask [B, R] bool, weights [B] or [B, R]. The gradient
    goes to `values` alone. `cliprange_value` None turns clipping off. Counts as in `aggregate`. Raises TypeError,
    ValueError. Source: the value clipping of OpenAI's PPO, as described by Engstrom et al. 2020, section 3.
    """
    require_token_inputs(response_mask, values=values, old_values=old_values, returns=returns)
    fit = value_fit(values, returns, response_mask)
    values = select(values, response_mask)
    returns = select(returns.detach(), response_mask)
    squared_error = (values - returns).square()
    is_clipped = torch.zeros_like(response_mask)
    if cliprange_value is not None:
        require_positive("cliprange_value", cliprange_value)
        old_values = select(old_values.detach(), response_mask)
        bounded = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
        clipped_error = (bounded - returns).square()
        is_clipped = clipped_error > squared_error
        squared_error = torch.where(is_clipped, clipped_error, squared_error)

    token_loss = weighted(0.5 * squared_error, weights, response_mask)
    loss = aggregate(token_loss, response_mask, loss_agg_mode, num_tokens, num_sequences)
    clip_frac = aggregate(is_clipped.float(), response_mask, "token-mean", num_tokens)
    return ValueLoss(loss, clip_frac, fit.explained_variance())

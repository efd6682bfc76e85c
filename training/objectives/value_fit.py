"""How well values explain returns, in a form that adds up over microbatches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.objectives.checks import require_token_inputs
from training.objectives.masked import divide_or_zero, masked_mean, masked_var


@dataclass(frozen=True)
class ValueFit:
    """Count, means and summed squared deviations of returns and of residuals (returns - values).

    All 0-d float32, detached. Explained variance is no mean, so that of parts cannot be averaged: `merge` the fits,
    then ask once.
    """

    num_tokens: Tensor
    return_mean: Tensor
    return_squares: Tensor
    residual_mean: Tensor
    residual_squares: Tensor

    def merge(self, other: ValueFit) -> ValueFit:
        """The fit over the union of two disjoint sets of tokens. Source: Chan, Golub and LeVeque 1979."""
        total = self.num_tokens + other.num_tokens
        share = divide_or_zero(other.num_tokens, total)
        return_gap = other.return_mean - self.return_mean
        residual_gap = other.residual_mean - self.residual_mean
        return ValueFit(
            total,
            self.return_mean + return_gap * share,
            self.return_squares + other.return_squares + return_gap.square() * self.num_tokens * share,
            self.residual_mean + residual_gap * share,
            self.residual_squares + other.residual_squares + residual_gap.square() * self.num_tokens * share,
        )

    def explained_variance(self) -> Tensor:
        """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant, or constant returns."""
        # A spread below the resolution of float32 at the mean is rounding, not variance.
        resolution = torch.finfo(torch.float32).eps * self.return_mean
        unexplained = divide_or_zero(self.residual_squares, self.return_squares)
        return torch.where(self.return_squares > self.num_tokens * resolution.square(), 1.0 - unexplained, 0.0)


@torch.no_grad()
def value_fit(values: Tensor, returns: Tensor, response_mask: Tensor) -> ValueFit:
    """Measure the fit on the valid tokens of [B, R] tensors, two passes each. Raises TypeError, ValueError."""
    require_token_inputs(response_mask, values=values, returns=returns)
    residuals = returns.float() - values.float()
    num_tokens = response_mask.sum().float()
    return ValueFit(
        num_tokens,
        masked_mean(returns, response_mask),
        masked_var(returns, response_mask, unbiased=False) * num_tokens,
        masked_mean(residuals, response_mask),
        masked_var(residuals, response_mask, unbiased=False) * num_tokens,
    )

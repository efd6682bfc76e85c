"""PPO's clipped policy loss, with asymmetric clipping, dual clip and per-trajectory weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from training.objectives.aggregate import aggregate, weighted
from training.objectives.checks import Count, require_in_range, require_token_inputs
from training.objectives.masked import select

_LOG_RATIO_LIMIT = 20.0


class PolicyLoss(NamedTuple):
    """0-d float32 tensors; only `loss` has a gradient. With global counts, those of microbatches add up."""

    loss: Tensor
    clip_frac: Tensor
    """Share of valid tokens where the clipped term is the larger one."""
    clip_frac_lower: Tensor
    """Share of valid tokens with a negative advantage where the dual clip binds."""
    approx_kl: Tensor
    """Mean of old_log_probs - log_probs over valid tokens, in nats."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    weights: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(log_probs - old_log_probs), capped at -A c where A < 0.

    Shapes: log_probs, old_log_probs, advantages [B, R] floating, response_mask [B, R] bool, weights [B] or [B, R]. The
    gradient goes to `log_probs` alone; everything else, weights included, is detached. The log-ratio is clamped to
    +-20. `clip_ratio_c` None turns the dual clip off, otherwise it must be above 1. Counts as in `aggregate`; the
    shares and approx_kl are token means, so pass `num_tokens` beside `num_sequences` in the sequence modes. Raises
    TypeError, ValueError. Source: Schulman et al. 2017 (PPO), eq. 7; Ye et al. 2020 (dual clip); Yu et al. 2025 (DAPO,
    two-sided clip range).
    """
    require_token_inputs(response_mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    _require_clip(clip_ratio_low, clip_ratio_high, clip_ratio_c)

    log_ratio = select(log_probs.float() - old_log_probs.detach().float(), response_mask)
    advantages = select(advantages.detach(), response_mask)
    ratio = torch.exp(log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    is_clipped = clipped > unclipped
    token_loss = torch.where(is_clipped, clipped, unclipped)
    is_capped = torch.zeros_like(response_mask)
    if clip_ratio_c is not None:
        cap = -advantages * clip_ratio_c
        is_capped = (advantages < 0) & (token_loss > cap)
        token_loss = torch.where(is_capped, cap, token_loss)

    def token_mean(x: Tensor) -> Tensor:
        return aggregate(x.detach().float(), response_mask, "token-mean", num_tokens)

    token_loss = weighted(token_loss, weights, response_mask)
    loss = aggregate(token_loss, response_mask, loss_agg_mode, num_tokens, num_sequences)
    return PolicyLoss(loss, token_mean(is_clipped), token_mean(is_capped), token_mean(-log_ratio))


def _require_clip(low: float, high: float, c: float | None) -> None:
    require_in_range("clip_ratio_low", low, 0.0, 1.0)
    require_in_range("clip_ratio_high", high, 0.0)
    if c is not None and not c > 1:
        raise ValueError(f"clip_ratio_c must be above 1 (or None to turn the dual clip off), got {c!r}")

"""One number from a [B, R] matrix of token losses, so that the split into microbatches does not show."""

from __future__ import annotations

import torch
from torch import Tensor

from training.objectives.checks import Count, require_floating, require_rank, require_same_shape, require_token_inputs
from training.objectives.masked import divide_or_zero, select

AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def aggregate(
    x: Tensor, mask: Tensor, mode: str, num_tokens: Count | None = None, num_sequences: Count | None = None
) -> Tensor:
    """Reduce token losses to a 0-d float32.

    * "token-mean": sum of valid tokens / num_tokens
    * "seq-mean-token-sum": sum over sequences of their token sums / num_sequences
    * "seq-mean-token-mean": sum over sequences of their token means / num_sequences

    Shapes: x [B, R] floating, mask [B, R] bool. The counts are those of the whole minibatch over all microbatches and
    ranks: parts then add up to the whole. They default to this batch's own: valid tokens, and sequences with at least
    one (so rows of padding do not count). A count of 0 gives 0. Raises TypeError, ValueError.
    """
    require_token_inputs(mask, x=x)
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"unknown aggregation {mode!r}: choose one of {', '.join(AGGREGATION_MODES)}")
    tokens_per_sequence = mask.sum(dim=-1)
    if mode == "token-mean":
        count = tokens_per_sequence.sum() if num_tokens is None else num_tokens
        return divide_or_zero(select(x, mask).sum(), count)
    per_sequence = select(x, mask).sum(dim=-1)
    if mode == "seq-mean-token-mean":
        per_sequence = divide_or_zero(per_sequence, tokens_per_sequence)
    count = (tokens_per_sequence > 0).sum() if num_sequences is None else num_sequences
    return divide_or_zero(per_sequence.sum(), count)


def weighted(token_loss: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:
    """Token losses [B, R] times detached weights: [B] (one a sequence) or [B, R], else ValueError."""
    if weights is None:
        return token_loss
    require_floating(weights=weights)
    if weights.dim() == 1:
        require_rank(2, "[B, R]", mask=mask)
        if weights.shape[0] != mask.shape[0]:
            raise ValueError(f"weights has shape {tuple(weights.shape)}, want [B] or [B, R] for {tuple(mask.shape)}")
        weights = weights.unsqueeze(-1).expand(mask.shape)
    require_same_shape(mask=mask, weights=weights)
    return torch.mul(token_loss, select(weights.detach(), mask))

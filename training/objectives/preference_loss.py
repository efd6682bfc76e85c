"""The Bradley-Terry loss of a reward model on pairs of answers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.objectives.checks import Count, require_in_range, require_pair_inputs
from training.objectives.masked import divide_or_zero


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | float | None = None,
    label_smoothing: float = 0.0,
    center_coef: float = 0.0,
    weights: Tensor | None = None,
    num_pairs: Count | None = None,
) -> Tensor:
    """Mean over pairs of -logsigmoid(chosen - rejected - margin), plus center_coef * mean((chosen + rejected)^2).

    Shapes: scores [P] floating; margin [P] or a number; weights [P] -> 0-d float32. With `label_smoothing` e in [0,
    0.5), the rate at which labels are believed flipped, the loss is the unbiased ((1 - e) l(z) - e l(-z)) / (1 - 2e), z
    being the margin left after `margin`; it can be negative. `weights` multiply the preference term, not the centring
    one; a pair of weight 0 has no say in the former whatever its scores. Sums are divided by `num_pairs` (default P,
    never the sum of weights), so microbatches add up. Margin and weights are detached. No pairs give 0. Raises
    TypeError, ValueError. Source: Bradley and Terry 1952; margin: Touvron et al. 2023 (Llama 2), eq. 2; noise:
    Natarajan et al. 2013, lemma 1, and Chowdhury et al. 2024; centring: Eisenstein et al. 2023.
    """
    require_pair_inputs(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    require_in_range("center_coef", center_coef, low=0.0)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing!r}")
    chosen, rejected = chosen_scores.float(), rejected_scores.float()
    count = chosen.shape[0] if num_pairs is None else num_pairs

    logits = _minus_margin(chosen - rejected, margin)
    takes_part = torch.ones_like(logits, dtype=torch.bool)
    if weights is not None:
        require_pair_inputs(chosen_scores=chosen_scores, weights=weights)
        takes_part = weights != 0
    logits = torch.where(takes_part, logits, 0.0)
    per_pair = -logsigmoid(logits)
    if label_smoothing > 0:
        flipped = -logsigmoid(-logits)
        per_pair = ((1 - label_smoothing) * per_pair - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    if weights is not None:
        per_pair = per_pair * weights.detach().float()
    loss = divide_or_zero(per_pair.sum(), count)
    if center_coef > 0:
        loss = loss + center_coef * divide_or_zero((chosen + rejected).square().sum(), count)
    return loss


def _minus_margin(score_gap: Tensor, margin: Tensor | float | None) -> Tensor:
    if margin is None:
        return score_gap
    if isinstance(margin, Tensor):
        require_pair_inputs(score_gap=score_gap, margin=margin)
        return score_gap - margin.detach().float()
    require_in_range("margin", margin)
    return score_gap - margin

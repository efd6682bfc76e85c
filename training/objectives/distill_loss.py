"""What a small reward model learns from a large one: how sure, how far apart, how good."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.objectives.checks import Count, require_in_range, require_pair_inputs, require_positive
from training.objectives.masked import divide_or_zero
from training.objectives.preference_loss import bradley_terry_loss


class DistillTerms(NamedTuple):
    """The four terms before weighting, 0-d float32, each with a gradient to the student alone."""

    preference_kl: Tensor
    margin_error: Tensor
    pointwise_error: Tensor
    label_loss: Tensor


def preference_kl(teacher_margins: Tensor, student_margins: Tensor, *, num_pairs: Count | None = None) -> Tensor:
    """Mean over pairs of KL( Bernoulli(sigmoid(teacher)) || Bernoulli(sigmoid(student)) ), in nats.

    Shapes: margins (chosen - rejected score) [P] floating -> 0-d float32. The teacher is detached. Computed from
    log-sigmoids, so margins of hundreds give neither infinity nor NaN. Divided by `num_pairs` (default P); no pairs
    give 0. Raises TypeError, ValueError. Source: Hinton et al. 2015, on the two outcomes of a comparison.
    """
    require_pair_inputs(teacher_margins=teacher_margins, student_margins=student_margins)
    teacher, student = teacher_margins.detach().float(), student_margins.float()
    prefers_chosen = torch.sigmoid(teacher) * (logsigmoid(teacher) - logsigmoid(student))
    prefers_rejected = torch.sigmoid(-teacher) * (logsigmoid(-teacher) - logsigmoid(-student))
    per_pair = (prefers_chosen + prefers_rejected).clamp(min=0.0)  # below 0 is rounding
    return divide_or_zero(per_pair.sum(), per_pair.shape[0] if num_pairs is None else num_pairs)


def distill_terms(
    teacher_chosen: Tensor,
    teacher_rejected: Tensor,
    student_chosen: Tensor,
    student_rejected: Tensor,
    *,
    temperature: float = 1.0,
    label_weights: Tensor | None = None,
    score_offset: Tensor | float | None = None,
    num_pairs: Count | None = None,
) -> DistillTerms:
    """The terms of `distill_loss`, to log them apart.

    `label_weights` [P] weigh the label term pair by pair. `score_offset` is the mean of student minus teacher over all
    scores of the minibatch, chosen and rejected; it defaults to this batch's. Microbatches add up when they are handed
    the whole minibatch's, and with it detached the gradient is still exact, for deviations from a mean sum to 0.
    """
    require_pair_inputs(
        teacher_chosen=teacher_chosen,
        teacher_rejected=teacher_rejected,
        student_chosen=student_chosen,
        student_rejected=student_rejected,
    )
    require_positive("temperature", temperature)
    count = student_chosen.shape[0] if num_pairs is None else num_pairs
    teacher = torch.stack((teacher_chosen, teacher_rejected)).detach().float()
    student = torch.stack((student_chosen, student_rejected)).float()
    teacher_margins, student_margins = teacher[0] - teacher[1], student[0] - student[1]
    errors = student - teacher
    if score_offset is None:
        score_offset = divide_or_zero(errors.detach().sum(), errors.numel())
    elif isinstance(score_offset, Tensor):
        score_offset = score_offset.detach().float()
    return DistillTerms(
        preference_kl(teacher_margins / temperature, student_margins / temperature, num_pairs=count),
        divide_or_zero((student_margins - teacher_margins).square().sum(), count),
        divide_or_zero(0.5 * (errors - score_offset).square().sum(), count),  # two scores a pair
        bradley_terry_loss(student[0], student[1], weights=label_weights, num_pairs=count),
    )


def distill_loss(
    teacher_chosen: Tensor,
    teacher_rejected: Tensor,
    student_chosen: Tensor,
    student_rejected: Tensor,
    *,
    temperature: float = 1.0,
    margin_weight: float,
    pointwise_weight: float,
    label_weight: float,
    label_weights: Tensor | None = None,
    score_offset: Tensor | float | None = None,
    num_pairs: Count | None = None,
) -> Tensor:
    """preference_kl + margin_weight * squared error of margins + pointwise_weight * squared error of centred scores
    + label_weight * Bradley-Terry loss of the student on the labels.

    Shapes: scores [P] floating -> 0-d float32. `temperature` divides both margins inside the KL term alone. Scores are
    centred by their mean over all 2P of them, teacher and student each by its own, since a reward model is defined up
    to a constant. Other arguments as in `distill_terms`. Raises TypeError, ValueError.
    """
    require_in_range("margin_weight", margin_weight, low=0.0)
    require_in_range("pointwise_weight", pointwise_weight, low=0.0)
    require_in_range("label_weight", label_weight, low=0.0)
    terms = distill_terms(
        teacher_chosen,
        teacher_rejected,
        student_chosen,
        student_rejected,
        temperature=temperature,
        label_weights=label_weights,
        score_offset=score_offset,
        num_pairs=num_pairs,
    )
    return (
        terms.preference_kl
        + margin_weight * terms.margin_error
        + pointwise_weight * terms.pointwise_error
        + label_weight * terms.label_loss
    )

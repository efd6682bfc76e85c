"""The bugs planted in the losses; see `mutants.py`, which adds them to its own."""

from __future__ import annotations

from tests.training.objectives.mutant import Mutant

MUTANTS = [
    # policy loss
    Mutant(
        "wrong sign of the loss",
        "policy_loss",
        "unclipped = -advantages * ratio",
        "unclipped = advantages * ratio",
        "policy_loss",
    ),
    Mutant(
        "ratio upside down",
        "policy_loss",
        "log_probs.float() - old_log_probs.detach().float()",
        "old_log_probs.detach().float() - log_probs.float()",
        "policy_loss",
    ),
    Mutant(
        "un-clamped ratio",
        "policy_loss",
        "torch.exp(log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))",
        "torch.exp(log_ratio)",
        "policy_loss_extremes",
    ),
    Mutant(
        "optimistic clip",
        "policy_loss",
        "is_clipped = clipped > unclipped",
        "is_clipped = clipped < unclipped",
        "policy_loss",
    ),
    Mutant(
        "clip bounds swapped",
        "policy_loss",
        "1.0 - clip_ratio_low, 1.0 + clip_ratio_high",
        "1.0 - clip_ratio_high, 1.0 + clip_ratio_low",
        "policy_loss",
    ),
    Mutant(
        "dual clip on A > 0",
        "policy_loss",
        "(advantages < 0) & (token_loss > cap)",
        "(advantages > 0) & (token_loss > cap)",
        "policy_loss",
    ),
    Mutant(
        "dual clip on every A",
        "policy_loss",
        "(advantages < 0) & (token_loss > cap)",
        "token_loss > cap.abs() * 0.5",
        "policy_loss",
    ),
    Mutant(
        "dual clip raises the loss",
        "policy_loss",
        "torch.where(is_capped, cap, token_loss)",
        "torch.maximum(cap, token_loss)",
        "policy_loss",
    ),
    Mutant("gradient into old log-probs", "policy_loss", "old_log_probs.detach()", "old_log_probs", "policy_loss"),
    Mutant(
        "gradient into advantages", "policy_loss", "select(advantages.detach(), ", "select(advantages, ", "policy_loss"
    ),
    Mutant("approx_kl negated", "policy_loss", "token_mean(-log_ratio)", "token_mean(log_ratio)", "policy_loss"),
    Mutant(
        "metrics by local counts", "policy_loss", '"token-mean", num_tokens)', '"token-mean")', "policy_loss_splits"
    ),
    Mutant(
        "weights forgotten", "policy_loss", "weighted(token_loss, weights, response_mask)", "token_loss", "policy_loss"
    ),
    # value loss
    Mutant(
        "value weights forgotten",
        "value_loss",
        "weighted(0.5 * squared_error, weights, response_mask)",
        "0.5 * squared_error",
        "value_loss",
    ),
    Mutant("value loss without its half", "value_loss", "0.5 * squared_error", "squared_error", "value_loss"),
    Mutant(
        "optimistic value clip",
        "value_loss",
        "clipped_error > squared_error",
        "clipped_error < squared_error",
        "value_loss",
    ),
    Mutant(
        "clips around returns",
        "value_loss",
        "old_values - cliprange_value, old_values +",
        "returns - cliprange_value, returns +",
        "value_loss",
    ),
    Mutant("gradient into returns", "value_loss", "returns.detach()", "returns", "value_loss"),
    Mutant(
        "value metrics by local counts", "value_loss", '"token-mean", num_tokens)', '"token-mean")', "value_loss_splits"
    ),
    Mutant("unexplained variance", "value_fit", "1.0 - unexplained", "unexplained", "value_loss"),
    Mutant(
        "merges without the gap",
        "value_fit",
        "other.return_squares + return_gap.square() * self.num_tokens * share",
        "other.return_squares",
        "value_loss_splits",
    ),
    # preferences
    Mutant(
        "swapped chosen and rejected",
        "preference_loss",
        "_minus_margin(chosen - rejected",
        "_minus_margin(rejected - chosen",
        "bradley_terry",
    ),
    Mutant(
        "margin added", "preference_loss", "score_gap - margin.detach()", "score_gap + margin.detach()", "bradley_terry"
    ),
    Mutant(
        "preference weights forgotten",
        "preference_loss",
        "per_pair = per_pair * weights.detach().float()",
        "per_pair = per_pair * 1.0",
        "bradley_terry",
    ),
    Mutant("smoothing without bias correction", "preference_loss", " / (1 - 2 * label_smoothing)", "", "bradley_terry"),
    Mutant(
        "ordinary label smoothing",
        "preference_loss",
        "per_pair - label_smoothing * flipped",
        "per_pair + label_smoothing * flipped",
        "bradley_terry",
    ),
    Mutant(
        "centres the difference",
        "preference_loss",
        "(chosen + rejected).square()",
        "(chosen - rejected).square()",
        "bradley_terry",
    ),
    Mutant(
        "divides by the weights",
        "preference_loss",
        "loss = divide_or_zero(per_pair.sum(), count)",
        "loss = per_pair.sum() / (weights.sum() if weights is not None else count)",
        "bradley_terry",
    ),
    Mutant(
        "KL from student to teacher",
        "distill_loss",
        "teacher, student = teacher_margins.detach().float(), student_margins.float()",
        "student, teacher = teacher_margins.detach().float(), student_margins.float()",
        "preference_kl",
    ),
    Mutant("half of the KL", "distill_loss", "(prefers_chosen + prefers_rejected)", "prefers_chosen", "preference_kl"),
    Mutant(
        "KL from raw logarithms",
        "distill_loss",
        "logsigmoid(-teacher) - logsigmoid(-student)",
        "torch.log(1 - torch.sigmoid(teacher)) - torch.log(1 - torch.sigmoid(student))",
        "preference_kl",
    ),
    Mutant(
        "teacher learns",
        "distill_loss",
        "torch.stack((teacher_chosen, teacher_rejected)).detach()",
        "torch.stack((teacher_chosen, teacher_rejected))",
        "distill",
    ),
    Mutant("scores not centred", "distill_loss", "(errors - score_offset)", "errors", "distill"),
    Mutant(
        "temperature on the teacher alone",
        "distill_loss",
        "student_margins / temperature",
        "student_margins",
        "distill",
    ),
    Mutant(
        "margins of the wrong sign",
        "distill_loss",
        "(student_margins - teacher_margins)",
        "(student_margins + teacher_margins)",
        "distill",
    ),
    Mutant("distillation ignores its labels", "distill_loss", "+ label_weight * terms.label_loss", "", "distill"),
    Mutant(
        "distillation by local counts",
        "distill_loss",
        "weights=label_weights, num_pairs=count",
        "weights=label_weights",
        "distill",
    ),
]

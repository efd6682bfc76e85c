"""The planted bugs, one line of source each: what a tired hand could write and a review could miss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In `file`, `before` (found exactly once) becomes `after`; `check` names the oracle check that must fail."""

    what: str
    file: str
    before: str
    after: str
    check: str


MUTANTS = [
    # masked statistics
    Mutant(
        "multiplies by the mask", "masked", "torch.where(mask, x.to(torch.float32), 0.0)", "x.float() * mask", "gae"
    ),
    Mutant("drops the mask", "masked", "torch.where(mask, x.to(torch.float32), 0.0)", "x.float()", "aggregate"),
    Mutant("turns the mask", "masked", "torch.where(mask, x.to(", "torch.where(~mask, x.to(", "masked_statistics"),
    Mutant(
        "counts every slot",
        "masked",
        "dim=dim), torch.sum(mask, dim=dim)",
        "dim=dim), torch.sum(mask | True, dim=dim)",
        "masked_statistics",
    ),
    Mutant("biased where unbiased", "masked", "count - 1 if unbiased else count", "count", "masked_statistics"),
    Mutant("whitens by the variance", "masked", "torch.rsqrt(", "torch.reciprocal(", "masked_statistics"),
    Mutant("forgets the mean", "masked", "whitened if shift_mean else", "whitened if True else", "masked_statistics"),
    # log-probabilities
    Mutant("multiplies by the temperature", "log_probs", ".div_(temperature)", ".mul_(temperature)", "token_log_probs"),
    Mutant("gradient without temperature", "log_probs", "0.0) / ctx.temperature", "0.0)", "token_log_probs"),
    Mutant(
        "gradient with a wrong sign",
        "log_probs",
        "local.mul_(-rows).scatter",
        "local.mul_(rows).scatter",
        "token_log_probs",
    ),
    Mutant(
        "gradient without the label",
        "log_probs",
        "unsqueeze(-1), rows)\n",
        "unsqueeze(-1), 0 * rows)\n",
        "token_log_probs",
    ),
    Mutant(
        "NaN logits poison",
        "log_probs",
        "local.masked_fill_(rows == 0, 0.0)\n        return gradient, None, None",
        "local\n        return gradient, None, None",
        "poison_before_the_mask",
    ),
    Mutant(
        "NaN logits poison by entropy",
        "log_probs",
        "local.masked_fill_(rows == 0, 0.0)\n        return gradient, None\n",
        "local\n        return gradient, None\n",
        "poison_before_the_mask",
    ),
    Mutant(
        "entropy gradient without H",
        "log_probs",
        "log_p.add_(entropies[block].unsqueeze(-1))",
        "log_p",
        "token_entropy",
    ),
    Mutant(
        "entropy of the wrong sign",
        "log_probs",
        "log_sums[block] - scaled.mul_",
        "log_sums[block] + scaled.mul_",
        "token_entropy",
    ),
    # KL
    Mutant(
        "KL the other way round",
        "kl",
        "log_probs.float() - ref_log_probs.detach().float()",
        "ref_log_probs.detach().float() - log_probs.float()",
        "kl_penalty",
    ),
    Mutant(
        "k3 the other way round",
        "kl",
        "torch.expm1(-bounded) + bounded",
        "torch.expm1(bounded) - bounded",
        "kl_penalty",
    ),
    Mutant("k2 without its half", "kl", "0.5 * log_ratio.square()", "log_ratio.square()", "kl_penalty"),
    Mutant("k3 unbounded", "kl", ".clamp(0.0, _K3_LIMIT)", "", "kl_penalty"),
    Mutant("no straight-through", "kl", 'kind.endswith("+")', "False", "kl_penalty"),
    Mutant("straight-through twice", "kl", "estimate.detach() + safe", "estimate + safe", "kl_penalty"),
    Mutant("reference with a gradient", "kl", "ref_log_probs.detach()", "ref_log_probs", "kl_penalty"),
    Mutant("single where", "kl", "torch.where(finite, log_ratio, 0.0)", "log_ratio", "poison_before_the_mask"),
    Mutant("controller runs away", "kl_control", "error * n_steps", "-error * n_steps", "kl_controllers"),
    Mutant("controller unclipped", "kl_control", "_LARGEST_ERROR = 0.2", "_LARGEST_ERROR = 20.0", "kl_controllers"),
    Mutant("controller forgets", "kl_control", 'self.kl_coef = float(state["kl_coef"])', "pass", "kl_controllers"),
    # rewards and advantages
    Mutant(
        "score on the first token",
        "rewards",
        "response_mask.flip(-1).cumsum(-1).flip(-1)",
        "response_mask.cumsum(-1)",
        "token_level_rewards",
    ),
    Mutant(
        "score on the last column",
        "rewards",
        "response_mask & (valid_from_here == 1)",
        "torch.arange(response_mask.shape[1]) == response_mask.shape[1] - 1 + 0 * valid_from_here",
        "token_level_rewards",
    ),
    Mutant("KL as a bonus", "rewards", "rewards - kl_coef", "rewards + kl_coef", "token_level_rewards"),
    Mutant(
        "padding cuts the sum",
        "advantages",
        "delta + gamma * lam * running, running)",
        "delta + gamma * lam * running, 0.0)",
        "gae",
    ),
    Mutant("padding hides the next value", "advantages", "values[:, t], next_value)", "values[:, t], 0.0)", "gae"),
    Mutant(
        "padding discounts",
        "advantages",
        "delta + gamma * lam * running, running)",
        "delta + gamma * lam * running, gamma * lam * running)",
        "gae",
    ),
    Mutant("no discount of the next value", "advantages", "gamma * next_value", "next_value", "gae"),
    Mutant("lambda forgotten", "advantages", "gamma * lam * running, running", "gamma * running, running", "gae"),
    Mutant("returns are advantages", "advantages", "advantages, advantages + values", "advantages, advantages", "gae"),
    Mutant(
        "whitens unasked",
        "advantages",
        "advantages, advantages + values",
        "(advantages - advantages.mean()) / advantages.std(), advantages + values",
        "gae",
    ),
    # aggregation
    Mutant(
        "mean of means",
        "aggregate",
        "divide_or_zero(select(x, mask).sum(), count)",
        "divide_or_zero(select(x, mask).sum(dim=-1), tokens_per_sequence).mean()",
        "aggregate",
    ),
    Mutant("token mean by sequences", "aggregate", 'mode == "token-mean"', "False", "aggregate"),
    Mutant(
        "means over all columns",
        "aggregate",
        "divide_or_zero(per_sequence, tokens_per_sequence)",
        "per_sequence / mask.shape[1]",
        "aggregate",
    ),
    Mutant(
        "counts empty sequences",
        "aggregate",
        "(tokens_per_sequence > 0).sum()",
        "tokens_per_sequence.numel()",
        "aggregate",
    ),
    Mutant(
        "ignores the global tokens",
        "aggregate",
        "tokens_per_sequence.sum() if num_tokens is None else num_tokens",
        "tokens_per_sequence.sum()",
        "policy_loss_splits",
    ),
    Mutant(
        "ignores the global sequences",
        "aggregate",
        "(tokens_per_sequence > 0).sum() if num_sequences is None else num_sequences",
        "(tokens_per_sequence > 0).sum()",
        "policy_loss_splits",
    ),
    Mutant("weights with a gradient", "aggregate", "weights.detach()", "weights", "policy_loss"),
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

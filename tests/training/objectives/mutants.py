"""The planted bugs, one line of source each: what a tired hand could write and a review could miss."""

from __future__ import annotations

from tests.training.objectives import mutants_losses
from tests.training.objectives.mutant import Mutant

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
    *mutants_losses.MUTANTS,
]

"""Per-token estimates of the KL divergence from a reference, in nats."""

from __future__ import annotations

import torch
from torch import Tensor

from training.objectives.checks import require_floating, require_same_shape

KL_KINDS = ("k1", "abs", "k2", "k3")
_EXPONENT_LIMIT = 20.0
_K3_LIMIT = 10.0


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate from d = log_probs - ref_log_probs, token by token; same shape, float32.

    * "k1": d, unbiased when the tokens were drawn from the policy, may be negative
    * "abs": |d|
    * "k2": d^2 / 2, whose gradient is that of the KL divergence on the policy's own samples
    * "k3": exp(-d) + d - 1, non-negative; d is clamped to +-20 before the exponential, the result to 10
    * a trailing "+" keeps that value and takes the gradient of k2 (straight-through)

    The gradient goes to `log_probs` alone. A slot whose d is not finite keeps its (non-finite) value and passes no
    gradient, so that masking it downstream is enough. Raises ValueError for an unknown kind or unequal shapes,
    TypeError for dtypes. Source: Schulman, "Approximating KL divergence" (2020); the straight-through estimator is
    Bengio et al. 2013.
    """
    base = kind.removesuffix("+")
    if base not in KL_KINDS:
        raise ValueError(f"unknown KL kind {kind!r}: choose one of {', '.join(KL_KINDS)}, each with or without '+'")
    require_floating(log_probs=log_probs, ref_log_probs=ref_log_probs)
    require_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)

    log_ratio = log_probs.float() - ref_log_probs.detach().float()
    finite = log_ratio.isfinite()
    safe = torch.where(finite, log_ratio, 0.0)
    estimate = _estimate(safe, base)
    if kind.endswith("+"):
        # The second term is exactly 0 and its derivative is d: that of k2, with no square that could overflow.
        estimate = estimate.detach() + safe.detach() * (safe - safe.detach())
    return torch.where(finite, estimate, _estimate(log_ratio.detach(), base))


def _estimate(log_ratio: Tensor, base: str) -> Tensor:
    if base == "k1":
        return log_ratio
    if base == "abs":
        return log_ratio.abs()
    if base == "k2":
        return 0.5 * log_ratio.square()
    bounded = log_ratio.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    # expm1, because exp(-d) + d - 1 loses every digit where policies are close. Below 0 is rounding alone.
    return (torch.expm1(-bounded) + bounded).clamp(0.0, _K3_LIMIT)

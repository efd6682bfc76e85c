"""Importance weights: how much likelier our policy makes a stored token than the policy that wrote it.

Axes: B trajectories, R response positions. Masks are bool, True participates; masked slots may hold NaN.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceMode = Literal["truncate", "clip_to", "mask"]

LOG_RATIO_LIMIT = 20.0
"""exp is taken of log-ratios clamped to +-this, so that no weight overflows float32."""


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    level: ImportanceLevel,
    mode: ImportanceMode,
    threshold: float | tuple[float, float],
    clip_to: float | None = None,
) -> Tensor:
    """Weights [B, R] that correct for stored data having been written by another policy.

    `log_ratio` [B, R]: old_log_probs - behavior_log_probs, in nats. `mask` [B, R] bool.

    level: `token` weighs each token by itself; `sequence` by the product over its trajectory's valid tokens;
    `geometric` by the geometric mean over them. A trajectory's weight is repeated over its valid tokens.

    mode: `truncate` gives min(w, threshold) (Ionides 2008, truncated importance sampling; Espeholt et al. 2018, eq. 1);
    `clip_to` turns a weight above `threshold` into `clip_to`; `mask` turns a weight outside [1/threshold, threshold],
    or outside an explicit (low, high), both ends included, into 0.

    The log-ratio is clamped to +-20 after the level's reduction and before exp. The result is float32, carries no
    gradient, and is 0 in masked slots. A NaN in a valid slot stays visible as NaN. Raises ValueError on wrong
    arguments.
    """
    _check_shapes(log_ratio, mask)
    low, high = _bounds(mode, threshold, clip_to)
    with torch.no_grad():
        reduced = _reduce(torch.where(mask, log_ratio.detach().float(), 0.0), mask, level)
        weights = reduced.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        if mode == "truncate":
            weights = weights.clamp(max=high)
        elif mode == "clip_to":
            assert clip_to is not None
            weights = torch.where(weights > high, clip_to, weights)
        else:
            weights = torch.where((weights < low) | (weights > high), 0.0, weights)
        return torch.where(mask, weights, 0.0)


def effective_sample_fraction(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Kish's effective sample size over n: (sum w)^2 / (n * sum w^2), a 0-d float32 tensor in (0, 1].

    `weights` of any shape; `mask` bool of the same shape says which of them count (default: all). 1 when all are equal,
    1/n when one outweighs the rest. 0 when nothing participates or every weight is 0. The scale of the weights cancels.
    """
    if mask is not None:
        _check_shapes(weights, mask)
    with torch.no_grad():
        values = weights.detach().float()
        values = values.flatten() if mask is None else values[mask]
        peak = values.abs().max() if values.numel() else torch.zeros((), device=values.device)
        if values.numel() == 0 or bool(peak == 0):
            return torch.zeros((), device=values.device)
        scaled = values / peak  # squares of raw weights could overflow
        fraction = scaled.sum().square() / (values.numel() * scaled.square().sum())
        return fraction.clamp(max=1.0)


def _reduce(log_ratio: Tensor, mask: Tensor, level: ImportanceLevel) -> Tensor:
    """One log-ratio for each token, or one for each trajectory repeated over its tokens; masked slots are 0 already."""
    if level == "token":
        return log_ratio
    total = log_ratio.sum(dim=-1, keepdim=True)
    if level == "sequence":
        return total.expand_as(log_ratio)
    if level == "geometric":
        return (total / mask.sum(dim=-1, keepdim=True).clamp(min=1)).expand_as(log_ratio)
    raise ValueError(f'level {level!r} is none of "token", "sequence", "geometric"')


def _bounds(mode: ImportanceMode, threshold: float | tuple[float, float], clip_to: float | None) -> tuple[float, float]:
    """The (low, high) that a weight is compared with; raises ValueError on a pair that means nothing."""
    if mode not in ("truncate", "clip_to", "mask"):
        raise ValueError(f'mode {mode!r} is none of "truncate", "clip_to", "mask"')
    if isinstance(threshold, tuple | list):
        if mode != "mask":
            raise ValueError(f'an explicit (low, high) belongs to mode "mask"; mode {mode!r} takes one threshold')
        low, high = (float(bound) for bound in threshold)
        if math.isnan(low) or math.isnan(high) or not 0.0 <= low <= high:
            raise ValueError(f"threshold {threshold!r}: (low, high) must satisfy 0 <= low <= high")
        return low, high
    high = float(threshold)
    if not high > 0.0:
        raise ValueError(f"threshold {threshold!r} must be above 0")
    if mode == "mask" and high < 1.0:
        raise ValueError(f'threshold {threshold!r} must be at least 1: mode "mask" keeps [1/threshold, threshold]')
    if mode == "clip_to" and (clip_to is None or not clip_to >= 0.0):
        raise ValueError(f'mode "clip_to" needs clip_to >= 0, put for weights above the threshold; got {clip_to!r}')
    return 1.0 / high, high


def _check_shapes(values: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool (True participates), got {mask.dtype}")
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape")

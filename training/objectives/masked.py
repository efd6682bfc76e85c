"""Statistics over the slots that participate.

Masked slots may hold anything, NaN and infinity included: they are replaced before the arithmetic, so neither a value
nor a gradient can leak from them. No participating slot gives 0. Everything is float32, whatever the dtype of `x`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.objectives.checks import Count, require_mask, require_same_shape

Dim = int | tuple[int, ...] | None
WHITEN_EPSILON = 1e-8


def select(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in float32 with masked slots exactly 0. Selected, not multiplied: 0 * NaN is NaN, in backward too."""
    return torch.where(mask, x.to(torch.float32), 0.0)


def divide_or_zero(total: Tensor, count: Count) -> Tensor:
    """`total / count`, and 0 (still part of the graph) where the count is 0. Raises ValueError for a negative count."""
    if isinstance(count, Tensor):
        divisor = count.detach().to(device=total.device, dtype=torch.float32)
    else:
        if not (math.isfinite(count) and count >= 0):
            raise ValueError(f"a count must be finite and not negative, got {count!r}")
        divisor = torch.full((), float(count), dtype=torch.float32, device=total.device)
    positive = divisor > 0
    return torch.where(positive, total / torch.where(positive, divisor, 1.0), 0.0)


def masked_mean(x: Tensor, mask: Tensor, dim: Dim = None) -> Tensor:
    """Sum over count of the participating slots, over `dim` or over all; 0 where none participates.

    Shapes: `x` and `mask` (bool) equal, any rank. Raises TypeError or ValueError when they are not.
    """
    _require(x, mask)
    return divide_or_zero(torch.sum(select(x, mask), dim=dim), torch.sum(mask, dim=dim))


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Two-pass variance of all participating slots, over n - 1 (`unbiased`) or n; 0 when fewer than two participate."""
    _require(x, mask)
    centred, _ = _centre(x, mask)
    return _variance(centred, mask, unbiased)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`(x - mean) * rsqrt(var + 1e-8)` over the participating slots, unbiased variance; masked slots are 0.

    `shift_mean=False` adds the mean back afterwards: unit spread, same centre.
    """
    _require(x, mask)
    centred, mean = _centre(x, mask)
    whitened = centred * torch.rsqrt(_variance(centred, mask, unbiased=True) + WHITEN_EPSILON)
    return whitened if shift_mean else select(whitened + mean, mask)


def _require(x: Tensor, mask: Tensor) -> None:
    require_mask(mask)
    if x.dtype.is_complex:
        raise TypeError(f"x must be real, got {x.dtype}")
    require_same_shape(x=x, mask=mask)


def _centre(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Deviations from the mean (0 where masked), and the mean.

    The mean of what is left is taken off once more: without that, rounding of the mean of a constant batch of, say,
    1000.1 survives, and division by a spread of almost 0 blows it up to order 1.
    """
    mean = masked_mean(x, mask)
    rough = select(x.to(torch.float32) - mean, mask)
    correction = masked_mean(rough, mask)
    return select(rough - correction, mask), mean + correction


def _variance(centred: Tensor, mask: Tensor, unbiased: bool) -> Tensor:
    count = torch.sum(mask)
    variance = divide_or_zero(torch.sum(centred.square()), count - 1 if unbiased else count)
    return torch.where(count > 1, variance, 0.0)

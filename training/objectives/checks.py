"""What every objective checks before it computes: shapes, dtypes, ranges. Wrong tensors fail here, in words."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Count = int | float | Tensor
"""A number of tokens, sequences or pairs: a plain number or a 0-d tensor (for instance one summed over ranks)."""


def require_floating(**tensors: Tensor) -> None:
    """Raise TypeError for a tensor that is not of a floating dtype."""
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")


def require_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless all shapes are equal: nothing is broadcast behind the caller's back."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {first_name} has {tuple(first.shape)}")


def require_rank(rank: int, axes: str, **tensors: Tensor) -> None:
    """Raise ValueError unless each tensor has `rank` axes; `axes` names them in the message."""
    for name, tensor in tensors.items():
        if tensor.dim() != rank:
            raise ValueError(f"{name} must have shape {axes}, got {tuple(tensor.shape)}")


def require_mask(mask: Tensor, name: str = "mask") -> None:
    """Raise TypeError unless the mask is bool (True participates): a 0/1 float mask hides its polarity."""
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be bool (True participates), got {mask.dtype}")


def require_token_inputs(response_mask: Tensor, **tensors: Tensor) -> None:
    """The common case: floating [B, R] tensors beside a bool [B, R] mask."""
    require_mask(response_mask, "response_mask")
    require_rank(2, "[B, R]", response_mask=response_mask)
    require_floating(**tensors)
    require_same_shape(response_mask=response_mask, **tensors)


def require_pair_inputs(**scores: Tensor) -> None:
    """The common case for preferences: floating [P] tensors, one number a pair."""
    require_floating(**scores)
    require_rank(1, "[P]", **scores)
    require_same_shape(**scores)


def require_in_range(name: str, value: float, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise ValueError unless `value` is finite and low <= value <= high."""
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} must be a finite number in [{low:g}, {high:g}], got {value!r}")


def require_positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and above 0, got {value!r}")

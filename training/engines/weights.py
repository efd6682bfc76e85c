"""Whole weights and moments out of parts that lie on several ranks, and back into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of all of it. Of a spread tensor a collective act: every rank asks, in the same order."""
    if _is_partitioned(tensor):
        with zero3().gathered(tensor) as found:
            copy: torch.Tensor = found.to("cpu", copy=True)
            return copy
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True)


def whole_of(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """All of them by name; a rank that keeps none joins in and holds one at a time."""
    found = {}
    for name, tensor in tensors.items():
        copy = whole(tensor)
        if keep:
            found[name] = copy
    return found


@torch.no_grad()
def fill(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Put a whole value into a weight; of a spread one each rank takes its part. Every rank has the same value."""
    if not _is_partitioned(parameter):
        parameter.copy_(part_like(parameter, value))
        return
    with zero3().gathered(parameter, changed=True) as place:
        place.copy_(value)


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """The shape of all of a weight, wherever its parts lie."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape


def _is_partitioned(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "ds_id")  # DeepSpeed's mark of a weight that is a placeholder for its parts


def zero3() -> Any:
    """The module that knows DeepSpeed's parts, where there are any: it and DeepSpeed take seconds to import."""
    from training.engines import zero3 as module

    return module


def part_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as it lies where `parameter` lies: on its device, and spread as it is. Talks to no other rank."""
    if value.shape != parameter.shape:
        raise ValueError(f"a value of shape {tuple(value.shape)} for a weight of shape {tuple(parameter.shape)}")
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

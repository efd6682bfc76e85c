"""Rank, size and the few collective acts a loop needs. One process needs no process group at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """Where this process stands. `size` 1 makes every collective the identity."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce a tensor in place by summing; returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum gradients over ranks. Losses are divided by global counts, so the sum is the whole batch's gradient."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def share(self, items: list[int]) -> list[int]:
        """This rank's items, dealt like cards so that every rank gets its fair part."""
        return items[self.rank :: self.size]


def current_world() -> World:
    """The world torchrun describes in the environment; joins the process group on first use."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return World(dist.get_rank(), size)

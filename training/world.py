"""Rank, size and the few collective acts a loop needs. One process needs no process group at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from training.process import STRATEGY, ZERO_STAGE

Item = TypeVar("Item")


@dataclass(frozen=True)
class Turn:
    """A rank's turn at one microbatch. Example: Turn([3, 4], counts=True, last=False).

    `counts` false: another rank's microbatch once more, read in step with it and added to nothing.
    """

    items: list[int]
    counts: bool = True
    last: bool = True


@dataclass(frozen=True)
class World:
    """Where this process stands. `size` 1 makes every collective the identity.

    `strategy`: ddp, each rank holds a replica; fsdp2, all is spread over the ranks; deepspeed, what `zero_stage` says:
    0 nothing, 1 the moments, 2 the gradients as well, 3 the weights too.
    """

    rank: int = 0
    size: int = 1
    strategy: str = "ddp"
    zero_stage: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files."""
        return self.rank == 0

    @property
    def in_step(self) -> bool:
        """Whether a pass through a network, or its gradient, is itself a collective act: all ranks make the same."""
        return self.size > 1 and self.strategy != "ddp"

    @property
    def spreads_weights(self) -> bool:
        """Whether a rank keeps no more than its part of a network's weights."""
        return self.size > 1 and (self.strategy == "fsdp2" or (self.strategy == "deepspeed" and self.zero_stage == 3))

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce a tensor in place by summing; returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum gradients over ranks. Losses are divided by global counts, so the sum is the whole batch's gradient.

        A weight without a gradient on every rank keeps none, so that the optimiser leaves it alone as on one rank.
        """
        if self.size == 1:
            return
        parameters = list(parameters)
        touched = self.sum_(torch.tensor([float(p.grad is not None) for p in parameters]))
        for parameter, count in zip(parameters, touched.tolist(), strict=True):
            if count == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, in rank order. Items are JSON, of any size: a rank may have nothing to say."""
        if self.size == 1:
            return [item]
        text = json.dumps(item).encode()
        length = torch.tensor([len(text)])
        dist.all_reduce(length, op=dist.ReduceOp.MAX)
        padded = torch.tensor(list(text.ljust(int(length))), dtype=torch.uint8)
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded)
        return [json.loads(bytes(row.tolist())) for row in rows]

    def broadcast(self, item: Item) -> Item:
        """The main rank's item, on every rank; JSON, so that tuples come as lists.

        For whatever is decided by. Devices may differ in a number's last bit: of two ranks that each look for
        themselves one would keep a state, stop or roll back, and the other wait for it in a collective for ever.
        """
        if self.size == 1:
            return item
        text = json.dumps(item).encode() if self.is_main else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, src=0)
        row = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
        dist.broadcast(row, src=0)
        found: Item = json.loads(bytes(row.tolist()))
        return found

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite a tensor with the main rank's, of the same shape; returns it."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def turns(self, microbatches: Sequence[list[int]]) -> list[Turn]:
        """This rank's microbatches, dealt like cards so that every rank gets its fair part.

        Ranks that go in step all take as many turns: one whose cards have run out reads the last microbatch once more.
        """
        mine = [(batch, True) for batch in microbatches[self.rank :: self.size]]
        if self.in_step:
            mine += [(microbatches[-1], False)] * (-(-len(microbatches) // self.size) - len(mine))
        return [Turn(batch, counts, last=i == len(mine) - 1) for i, (batch, counts) in enumerate(mine)]


def current_world() -> World:
    """The world torchrun describes in the environment; joins the process group on first use."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    if not dist.is_initialized():
        # Gradients are summed where they are; counts, metrics and messages lie on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return World(dist.get_rank(), size, os.environ.get(STRATEGY, "ddp"), int(os.environ.get(ZERO_STAGE, "0")))

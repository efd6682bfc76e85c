"""Which way of sharing a network a World asks for. FSDP2 and DeepSpeed are imported only where they are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from training.engine import Engine, EngineSettings
from training.world import World

if TYPE_CHECKING:
    from training.models.backbone import Backbone
    from training.models.network import Network


def load_spread(load: Callable[[torch.device], Backbone], device: torch.device, world: World) -> Backbone:
    """The backbone that `load` reads, adapters included, shared among the ranks as the world says.

    Where it is to be spread it is read into main memory, since no GPU need have room for all of it; for fsdp2 by one
    rank of a machine after the other, since neither need that have room for as many copies as there are ranks.
    """
    if not world.spreads_weights:
        return load(device)
    if world.strategy == "deepspeed":
        from training.engines.zero3 import PartitionedModel

        backbone = load(torch.device("cpu"))
        backbone.spread(lambda model: PartitionedModel(model, device, world))  # all ranks at once: it is collective
        return backbone
    from training.engines.fsdp2 import ShardedModel, device_mesh

    mesh = device_mesh(device, world)
    with _one_at_a_time(world):
        backbone = load(torch.device("cpu"))
        backbone.spread(lambda model: ShardedModel(model, mesh))
    return backbone


@contextmanager
def _one_at_a_time(world: World) -> Iterator[None]:
    here, place = int(os.environ.get("LOCAL_WORLD_SIZE", world.size)), int(os.environ.get("LOCAL_RANK", world.rank))
    for _ in range(place):
        world.barrier()
    yield
    for _ in range(here - place):
        world.barrier()


def build_engine(network: Network, settings: EngineSettings, world: World) -> Engine:
    """The optimiser of what a network trains."""
    if not world.in_step:
        return Engine(network.parameters(), settings, world)
    if world.strategy == "deepspeed":
        if world.zero_stage == 3:
            from training.engines.zero3 import Zero3Engine

            return Zero3Engine(network, settings, world)
        from training.engines.deepspeed import ZeroEngine

        return ZeroEngine(network, settings, world)
    from training.engines.fsdp2 import ShardedEngine

    return ShardedEngine(network.parameters(), settings, world)

"""FSDP2: every rank keeps a part of each weight, gradient and moment; layers are gathered while they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from training.engine import Engine
from training.engines.spread import Doorway, Read
from training.world import World


def device_mesh(device: torch.device, world: World) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh(device.type, (world.size,))


class ShardedModel:
    """A model whose weights are spread over all ranks, decoder layer by decoder layer.

    Reading it is a collective act, except inside `whole()`. Gradients are summed over ranks by its backward pass.
    """

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        for layer in [m for m in model.modules() if type(m).__name__ in set(model._no_split_modules or ())]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        # Embeddings, last norm and output layer in one group: they may share a weight. It is resharded like the others,
        # or what the loops see between two passes would not be the parts.
        self._door = cast(Any, fully_shard(Doorway(model), mesh=mesh, reshard_after_forward=True))
        self._shards = [m for m in self._door.modules() if isinstance(m, FSDPModule)]
        for shard in self._shards:
            # Losses are divided by global counts: the sum over ranks is the gradient, where FSDP would average.
            shard.set_gradient_divide_factor(1.0)
            shard.set_force_sum_reduction_for_comms(True)

    def read(self, read: Callable[[], Read]) -> Read:
        """Run a forward pass of any kind; the layers that it calls are gathered one by one."""
        found: Read = self._door(read)
        return found

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every weight whole on every rank, for passes without gradients that the ranks need not walk in step."""
        for shard in self._shards:
            shard.unshard()
            shard.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for shard in self._shards:
                shard.set_reshard_after_forward(True, recurse=False)
                shard.reshard()


class ShardedEngine(Engine):
    """AdamW on parts: elementwise, so that each rank steps its own. Small heads stay whole on every rank."""

    def _sum_and_clip(self) -> torch.Tensor:
        parameters = list(self.parameters.values())
        kinds = [[p for p in parameters if isinstance(p, DTensor) is spread] for spread in (True, False)]
        self.world.sum_gradients(kinds[1])  # those of parts were summed in the backward pass
        norms = [_whole_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
        norm = self.world.broadcast_(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])))
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, self.settings.max_grad_norm, norm)
        return norm


def _whole_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all ranks' parts; zero of none."""
    if not gradients:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm(gradients)
    found: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return found

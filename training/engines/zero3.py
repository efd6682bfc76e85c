"""DeepSpeed's ZeRO stage 3: every rank keeps a part of each weight as well; modules are gathered while they compute.

What gathers a network's weights (`PartitionedModel`) and what steps them (`Zero3Engine`) are apart, as they are for
FSDP2: a backbone may have several readers, each with an engine of its own, and the frozen ones have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from training.engine import EngineSettings
from training.engines.deepspeed import MOMENTS, ZeroEngine, import_deepspeed, zero_config
from training.engines.spread import Doorway, Read
from training.world import World

if TYPE_CHECKING:
    from training.models.network import Network


def partition(module: nn.Module, world: World) -> Any:
    """Leave a rank its part of each weight, on this process's device; each module gathers its own when it is called.

    Every rank has the same module, wherever it lies.
    """
    deepspeed = import_deepspeed()
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.utils.timer import NoopTimer

    deepspeed.init_distributed(dist_init_required=False)
    return DeepSpeedZeRoOffload(
        module, NoopTimer(), zero_config(world, 0.0), overlap_comm=False, prefetch_bucket_size=0, max_reuse_distance=0,
        max_live_parameters=0, param_persistence_threshold=0, model_persistence_threshold=0,
    )  # fmt: skip


class PartitionedModel:
    """A model whose weights are spread over all ranks, module by module. Reading it is a collective act."""

    def __init__(self, model: nn.Module, device: torch.device, world: World) -> None:
        self._door = Doorway(model)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        self._hooks = partition(self._door, world)
        self._is_whole = False

    def read(self, read: Callable[[], Read]) -> Read:
        """Run a forward pass of any kind; the modules that it calls are gathered one by one."""
        if self._is_whole:
            return read()
        self._hooks.release_backward_leftovers()  # what reads tokens has no gradient to say that it is done with
        found: Read = self._door(read=read)
        return found

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every weight whole on every rank, for passes without gradients that the ranks need not walk in step."""
        from deepspeed.runtime.zero import GatheredParameters

        hooks = self._hooks
        with GatheredParameters(self._door.parameters()):
            for hook in hooks.forward_hooks + hooks.backward_hooks:
                hook.remove()
            hooks.forward_hooks, hooks.backward_hooks = [], []
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False
                hooks._register_deepspeed_module(self._door)


class Zero3Engine(ZeroEngine):
    """AdamW on parts. The head is spread as well, and gathers itself when it is called."""

    def __init__(self, network: Network, settings: EngineSettings, world: World) -> None:
        self._head = partition(network.head, world) if network.head is not None else None
        super().__init__(network, settings, world)

    def backward(self, loss: torch.Tensor, turn: Any = None) -> None:
        """Add the gradient of one microbatch. Parts of it are summed over ranks at once."""
        super().backward(loss, turn)
        if self._head is not None:
            self._head.release_backward_leftovers()

    def _norm_of_parts(self) -> torch.Tensor:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        norm: torch.Tensor = combine_grad_norm_groups(self._zero._get_norm_groups())
        return norm

    def _forget_parts(self) -> None:
        self._zero.zero_grad(set_to_none=True)  # and the next gradient begins a sum
        self._zero.averaged_gradients = {}
        for bucket in self._zero.ipg_buckets.values():
            bucket.clear_params()

    def _link_moments(self) -> None:
        """They are looked up when asked for, of weights that have gradients."""
        self._all_trained()

    def _parts(self) -> list[torch.Tensor]:
        parts: list[torch.Tensor] = self._zero.fp32_partitioned_groups_flat
        return parts

    def _fill_moments(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        for name, parameter in self.parameters.items():
            for key in MOMENTS:
                if f"{key}/{name}" in tensors:
                    part = own_part(tensors[f"{key}/{name}"], parameter, self.world)
                    safe_set_local_optimizer_state(parameter, part.to(parameter.device), key)


def own_part(value: torch.Tensor, parameter: Any, world: World) -> torch.Tensor:
    """This rank's part of a whole value: ranks have equal parts, the last ones filled up with zeros."""
    size = parameter.partition_numel()
    padded = torch.zeros(size * world.size, dtype=value.dtype)
    padded[: value.numel()] = value.flatten()
    return padded[size * world.rank : size * (world.rank + 1)]


@contextmanager
def gathered(parameter: torch.Tensor, changed: bool = False) -> Iterator[torch.Tensor]:
    """The whole weight while the context lasts. With `changed` what the main rank writes there is kept by all."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter], modifier_rank=0 if changed else None):
        yield parameter.data

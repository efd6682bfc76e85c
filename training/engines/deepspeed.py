"""DeepSpeed ZeRO: the moments (stage 1) and gradients (2) of what is trained are spread over the ranks. 3: zero3.py.

DeepSpeed is given the trained weights alone: the passes through the network are ours, as they are without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from training.engine import Engine, EngineSettings
from training.engines.weights import whole_of
from training.errors import StageError
from training.world import Turn, World

if TYPE_CHECKING:
    from training.models.network import Network

MOMENTS = ("exp_avg", "exp_avg_sq")


STAGE_3 = {f"stage3_{name}": 0 for name in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")} | {
    "stage3_param_persistence_threshold": 0
}
"""Readers come in any order, and trace no path through the network that could be followed ahead."""


def zero_config(world: World, max_grad_norm: float) -> dict[str, Any]:
    """DeepSpeed's own settings. Weights keep the types that they were loaded in, so nothing is scaled."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Without partitions the clipping is that of replicas.
        "gradient_clipping": max_grad_norm if world.zero_stage else 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": world.zero_stage, "overlap_comm": False} | STAGE_3,
    }


class Holder(nn.Module):
    """The trained weights of a network, and a way for its loss into DeepSpeed."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters.values())

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, as it is."""
        return loss


class ZeroEngine(Engine):
    """AdamW whose parts DeepSpeed spreads. It averages gradients: each loss is multiplied by the number of ranks."""

    def __init__(self, network: Network, settings: EngineSettings, world: World) -> None:
        super().__init__(network.parameters(), settings, world)
        self._updates = 0
        self._all_trained()
        config = zero_config(world, settings.max_grad_norm)
        self._deepspeed = start_deepspeed(Holder(self.parameters), self.optimizer, config)
        self._zero = self._deepspeed.optimizer

    def _all_trained(self) -> None:
        """PEFT turns off the gradients of adapters that are not read; DeepSpeed takes such weights for frozen ones."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    def backward(self, loss: torch.Tensor, turn: Turn | None = None) -> None:
        """Add the gradient of one microbatch. With the last one, all ranks' gradients are summed."""
        turn = turn or Turn([])
        self._deepspeed.set_gradient_accumulation_boundary(turn.last)
        self._deepspeed.backward(self._deepspeed(loss * (self.world.size if turn.counts else 0)))

    def _sum_and_clip(self) -> torch.Tensor:
        if not self.world.zero_stage:  # summed already
            return self._clip()
        norm = self._norm_of_parts()  # clipped in the update
        return norm if float(norm) >= 0 else torch.tensor(math.nan)  # -1 is DeepSpeed's word for not finite

    def _norm_of_parts(self) -> torch.Tensor:
        norm: torch.Tensor = self._zero.scaled_global_norm()
        return norm

    def _update(self) -> None:
        self._deepspeed.step()
        self._updates += 1

    def _throw_gradients_away(self) -> None:
        super()._throw_gradients_away()
        if self.world.zero_stage:
            self._forget_parts()

    def _forget_parts(self) -> None:
        self._zero.zero_grad(set_to_none=True)
        for partitions in (self._zero.averaged_gradients, self._zero.all_grad_tensors):
            for place in partitions:
                partitions[place] = None
        self._zero.micro_step_id = -1  # the next gradient begins a sum

    def tensors(self) -> dict[str, torch.Tensor]:
        """Optimiser moments by parameter name, whole, on the main rank. Every rank asks; the others get none."""
        if not self.world.zero_stage:
            return super().tensors()
        if not self._updates:
            return {}
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_moments()
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            moments = {f"{key}/{name}": safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
            moments[f"step/{name}"] = torch.tensor(float(self._updates))
            found |= whole_of(moments, keep=self.world.is_main)
        return found

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Put moments and counters back, once the weights are back."""
        if not self.world.zero_stage:
            super().load(tensors, state)
            return
        super().load({}, state)
        self._zero.refresh_fp32_params()
        self._updates = int(max((float(t) for name, t in tensors.items() if name.startswith("step/")), default=0))
        if self._updates:
            self._make_moments()
            self._link_moments()
            self._fill_moments(tensors)

    def _make_moments(self) -> None:
        """DeepSpeed makes them in its first update; here there are some to put back before that."""
        for part in self._parts():
            moments = {key: torch.zeros_like(part) for key in MOMENTS}
            self.optimizer.state[part] = {"step": torch.tensor(float(self._updates))} | moments

    def _parts(self) -> list[torch.Tensor]:
        """What the optimiser steps here: this rank's part of each group of weights, in a row."""
        parts: list[torch.Tensor] = self._zero.single_partition_of_fp32_groups
        return parts

    def _link_moments(self) -> None:
        """DeepSpeed looks for them after its first group's first update, when the second group has none yet."""
        self._zero._hp_optimizer_states_linked = False
        self._zero._lazy_init_hp_params_optimizer_state()

    def _fill_moments(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        for name, parameter in self.parameters.items():
            for key in MOMENTS:
                if f"{key}/{name}" in tensors:
                    safe_set_full_optimizer_state(parameter, tensors[f"{key}/{name}"].to(parameter.device), key)


def start_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine around a module, on the process group that is there."""
    return import_deepspeed().initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def import_deepspeed() -> Any:
    """The package, told to compile nothing. Raises StageError where it is not installed."""
    try:
        import deepspeed
    except ImportError as error:
        raise StageError(
            f"runtime.strategy is deepspeed, which cannot be imported: {error}",
            "install deepspeed, or write `strategy: ddp` or `strategy: fsdp2`",
        ) from None
    # On CPUs it would compile collectives of its own, for minutes and with a compiler that need not be there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed

"""Optimiser, schedule, clipping and the refusal of non-finite steps, around one reader's weights.

`Engine` is what the loops see, and what replicas do; other ways to share weights are in training/engines/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.engines.weights import part_like, shape_of, whole_of
from training.world import Turn, World


@dataclass(frozen=True)
class EngineSettings:
    """`total_steps` is the real number of optimiser steps: the schedule ends where training ends."""

    learning_rate: float
    total_steps: int
    weight_decay: float = 0.0
    warmup_ratio: float = 0.0
    scheduler: str = "constant"
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class StepReport:
    """One optimiser step: gradient norm before clipping, rate used, and whether it was applied."""

    grad_norm: float
    learning_rate: float
    applied: bool


class Engine:
    """AdamW on named parameters. Losses must be divided by global counts; gradients are summed over ranks."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: EngineSettings, world: World | None = None
    ) -> None:
        self.parameters = dict(parameters)
        self.settings = settings
        self.world = world or World()
        self.steps_done = 0
        self.lr_scale = 1.0  # guards lower it
        self._norm: float | None = None
        decayed = [p for p in self.parameters.values() if len(shape_of(p)) >= 2]
        plain = [p for p in self.parameters.values() if len(shape_of(p)) < 2]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-8
        )

    def learning_rate(self) -> float:
        """Rate of the next step: schedule times what the guards left of it."""
        return self.settings.learning_rate * schedule(self.settings, self.steps_done) * self.lr_scale

    def backward(self, loss: torch.Tensor, turn: Turn | None = None) -> None:
        """Add the gradient of one microbatch; of a turn that only keeps the ranks in step, nothing is added."""
        (loss if turn is None or turn.counts else 0.0 * loss).backward()

    def prepare(self) -> float:
        """Sum the gradients over ranks, clip them, and return their norm before clipping.

        For whoever must know, before any step is applied, that all are finite; `step` does it where nobody has.
        """
        self._norm = float(self._sum_and_clip())
        return self._norm

    def _sum_and_clip(self) -> torch.Tensor:
        self.world.sum_gradients(self.parameters.values())
        return self._clip()

    def _clip(self) -> torch.Tensor:
        """Clip gradients that every rank has whole, all by the same norm; returns it."""
        parameters = list(self.parameters.values())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm: torch.Tensor = self.world.broadcast_(torch.nn.utils.get_total_norm(gradients, foreach=True))
        torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.max_grad_norm, norm, foreach=True)
        return norm

    def step(self, loss_is_finite: bool = True) -> StepReport:
        """Apply the accumulated gradients, unless the loss or their norm is not finite; then they are thrown away."""
        norm = self.prepare() if self._norm is None else self._norm
        self._norm = None
        rate = self.learning_rate()
        applied = loss_is_finite and math.isfinite(norm)
        if applied:
            for options in self.optimizer.param_groups:
                options["lr"] = rate
            self._update()
        self._throw_gradients_away()
        self.steps_done += 1
        return StepReport(norm, rate, applied)

    def _update(self) -> None:
        self.optimizer.step()

    def _throw_gradients_away(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Optimiser moments by parameter name, whole, on the main rank. Every rank asks; the others get none."""
        moments = {
            f"{key}/{name}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return whole_of(moments, keep=self.world.is_main)

    def state(self) -> dict[str, Any]:
        """Counters beside the tensors."""
        return {"steps_done": self.steps_done, "lr_scale": self.lr_scale}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Put moments and counters back. No moments are left from before."""
        self.optimizer.state.clear()
        for full_name, tensor in tensors.items():
            key, name = full_name.split("/", 1)
            parameter = self.parameters[name]
            kept = tensor.clone()
            self.optimizer.state[parameter][key] = kept if key == "step" else part_like(parameter, kept)
        self.steps_done = int(state["steps_done"])
        self.lr_scale = float(state["lr_scale"])


def schedule(settings: EngineSettings, step: int) -> float:
    """Multiplier of the peak rate at `step` (0-based): linear warm-up, then constant, linear or cosine to zero."""
    warmup = math.ceil(settings.warmup_ratio * settings.total_steps)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, settings.total_steps - warmup)
    if settings.scheduler == "linear":
        return max(0.0, 1.0 - done)
    if settings.scheduler == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return 1.0

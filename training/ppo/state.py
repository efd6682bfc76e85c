"""Everything a PPO run needs to go on bit for bit: what a checkpoint holds, and putting it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from training.checkpoint import Checkpoint, group, prefixed
from training.engine import Engine
from training.models.network import Network
from training.objectives import AdaptiveKLController, FixedKLController
from training.ppo.experience import ExperiencePool, RoundBatch, pack, unpack
from training.replay.prioritized import PrioritizedSampler

KLController = AdaptiveKLController | FixedKLController


@dataclass
class Cursor:
    """Where the run is. `step` counts optimiser steps tried, over all rounds, and never goes back; `applied` those of
    the policy that were applied and kept. `round_over`: the round ended early."""

    round: int = 0
    step_in_round: int = 0
    step: int = 0
    applied: int = 0
    good_step: int = -1
    round_over: bool = False
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2

    def next_round(self) -> None:
        """Move on to the next round's first step."""
        self.round, self.step_in_round, self.round_over = self.round + 1, 0, False


@dataclass
class Best:
    """The round that would be handed on: its selection score, its probe, and the policy's weights then."""

    score: float = float("-inf")
    round: int = -1
    probe: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class PPOState:
    """The mutable parts of a run, in one place."""

    policy: Network
    critic: Network
    actor: Engine
    critic_engine: Engine
    sampler: PrioritizedSampler
    kl: KLController
    pool: ExperiencePool
    cursor: Cursor
    best: Best
    ema: dict[str, torch.Tensor]
    batch: RoundBatch | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by group."""
        found = prefixed("policy", self.policy.tensors()) | prefixed("critic", self.critic.tensors())
        found |= prefixed("actor_optimizer", self.actor.tensors())
        found |= prefixed("critic_optimizer", self.critic_engine.tensors())
        found |= prefixed("fresh", pack(self.pool.fresh))
        found |= prefixed("sampler", {key: torch.from_numpy(a.copy()) for key, a in self._sampler_arrays().items()})
        found |= prefixed("best", self.best.tensors) | prefixed("ema", self.ema)
        if self.batch is not None:
            found |= prefixed("batch", self.batch.tensors())
        return found

    def state(self) -> dict[str, Any]:
        """All that is JSON."""
        return {
            "cursor": asdict(self.cursor),
            "actor": self.actor.state(),
            "critic": self.critic_engine.state(),
            "sampler": {k: v for k, v in self.sampler.state_dict().items() if not isinstance(v, np.ndarray)},
            "kl": self.kl.state_dict(),
            "best": {"score": self.best.score, "round": self.best.round, "probe": self.best.probe},
            "round_open": self.batch is not None,
        }

    def _sampler_arrays(self) -> dict[str, np.ndarray]:
        return {key: value for key, value in self.sampler.state_dict().items() if isinstance(value, np.ndarray)}

    def load(self, checkpoint: Checkpoint) -> None:
        """Put everything back, in place."""
        tensors, state = checkpoint.tensors, checkpoint.state
        self.policy.load_tensors(group("policy", tensors))
        self.critic.load_tensors(group("critic", tensors))
        self.actor.load(group("actor_optimizer", tensors), state["actor"])
        self.critic_engine.load(group("critic_optimizer", tensors), state["critic"])
        arrays = {key: tensor.numpy().copy() for key, tensor in group("sampler", tensors).items()}
        self.sampler.load_state_dict(state["sampler"] | arrays)
        self.kl.load_state_dict(state["kl"])
        self.pool.fresh = unpack(group("fresh", tensors))
        self.cursor = Cursor(**state["cursor"])
        self.best = _best(state["best"], group("best", tensors))
        self.ema = group("ema", tensors)
        self.batch = RoundBatch.from_tensors(group("batch", tensors)) if state["round_open"] else None


def _best(state: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Best:
    return Best(state["score"], state["round"], dict(state["probe"]), tensors)


def update_ema(ema: dict[str, torch.Tensor], policy: Network, decay: float) -> None:
    """ema = decay x ema + (1 - decay) x policy, tensor by tensor, in place."""
    for name, tensor in policy.tensors().items():
        ema[name].mul_(decay).add_(tensor, alpha=1.0 - decay)


class AveragedPolicy:
    """The averaged policy in place of the current one, for as long as the context lasts."""

    def __init__(self, state: PPOState, enabled: bool) -> None:
        self.state, self.enabled = state, enabled and bool(state.ema)
        self.kept: dict[str, torch.Tensor] = {}

    def __enter__(self) -> None:
        if self.enabled:
            self.kept = self.state.policy.tensors()
            self.state.policy.load_tensors(self.state.ema)

    def __exit__(self, *exception: object) -> None:
        if self.enabled:
            self.state.policy.load_tensors(self.kept)

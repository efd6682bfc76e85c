"""The networks of a PPO run: policy, critic and frozen reference, on one backbone where they can share it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from configs.schema.models import ModelsConfig
from configs.schema.ppo import PPOConfig
from training.context import StageContext
from training.engine import Engine, EngineSettings
from training.engines.choose import build_engine, load_spread
from training.errors import StageError
from training.examples import Encoder, Prompt
from training.models.backbone import Backbone, LoraSettings
from training.models.layout import Group, build_layout
from training.models.network import Network, ScalarHead
from training.models.tokenize import pad_id
from training.runtime import pick_device, pick_dtype
from training.world import World

POLICY, CRITIC = "policy", "critic"
MERGE_TOLERANCE = 1e-3


@dataclass
class Actors:
    """Who reads what. `critic` has its own head and its own optimiser always; its own weights or adapter, too."""

    policy: Network
    critic: Network
    reference: Network
    encoder: Encoder

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.policy.backbone.device


def build_actors(
    context: StageContext, models: ModelsConfig, ppo: PPOConfig, world: World | None = None
) -> Actors:
    """Load them. With LoRA the reference is the backbone with adapters off; without, it is a second, frozen copy."""
    device = pick_device()
    lora = ppo.lora_rank > 0
    dtype = pick_dtype(models.dtype, device) if lora else torch.float32

    def load(path: Path, *add: Callable[[Backbone], None], trained: bool = True) -> Backbone:
        def read(place: torch.device) -> Backbone:
            checkpointing = models.gradient_checkpointing and trained
            loaded = Backbone.load(path, device=place, dtype=dtype, gradient_checkpointing=checkpointing)
            for adapter in add:
                adapter(loaded)
            return loaded

        return load_spread(read, device, world or World())

    reference = context.input("reference")
    if not lora:
        shared = load(reference, trained=False)
        start = context.input("policy") if context.has_input("policy") else reference
        policy = Network(load(start), trains_backbone=True)
        critic = Network(load(reference), head=ScalarHead(shared.hidden_size), trains_backbone=True)
        return Actors(policy, critic, Network(shared), Encoder(shared.tokenizer, models))
    add_policy, add_critic = partial(_add_policy_adapter, context, ppo), partial(_add_critic_adapter, context, ppo)
    if models.share_backbone == "auto":
        shared = critic_backbone = load(reference, add_policy, add_critic)
    else:
        shared, critic_backbone = load(reference, add_policy), load(reference, add_critic)
    encoder, head = Encoder(shared.tokenizer, models), ScalarHead(shared.hidden_size)
    return Actors(Network(shared, POLICY), Network(critic_backbone, CRITIC, head), Network(shared), encoder)


def _add_critic_adapter(context: StageContext, ppo: PPOConfig, backbone: Backbone) -> None:
    rank = ppo.critic_lora_rank or ppo.lora_rank
    backbone.add_adapter(CRITIC, LoraSettings(rank, ppo.lora_alpha * rank / ppo.lora_rank), context.spec.seed)


def _add_policy_adapter(context: StageContext, ppo: PPOConfig, backbone: Backbone) -> None:
    if context.has_input("adapter"):
        backbone.load_adapter(POLICY, context.input("adapter"), context.spec.seed)
    else:
        backbone.add_adapter(POLICY, LoraSettings(ppo.lora_rank, ppo.lora_alpha), context.spec.seed)


def build_engines(actors: Actors, ppo: PPOConfig, world: World) -> tuple[Engine, Engine]:
    """Actor's and critic's optimisers. Schedules are sized by the most optimiser steps that the rounds can take."""
    steps_a_round = ppo.ppo_epochs * -(-ppo.train_batch_size // ppo.ppo_mini_batch_size)

    def engine(network: Network, rate: float, rounds: int) -> Engine:
        settings = EngineSettings(
            rate, rounds * steps_a_round, ppo.weight_decay, ppo.warmup_ratio, ppo.lr_scheduler, ppo.max_grad_norm
        )
        return build_engine(network, settings, world)

    actor = engine(actors.policy, ppo.actor_lr, ppo.rounds - ppo.critic_warmup_rounds)
    return actor, engine(actors.critic, ppo.critic_lr, ppo.rounds)


@torch.no_grad()
def save_policy(actors: Actors, context: StageContext, prompt: Prompt, write: bool = True) -> dict[str, Path]:
    """Write the servable policy folder (and its adapter), read it back, and compare it with the one in memory.

    Every rank saves, and one of them with `write`. Raises StageError when what was written does not answer like what
    was trained.
    """
    folder, adapter_folder = context.output("policy"), context.output("adapter")
    for old in (folder, adapter_folder) if write else ():
        shutil.rmtree(old, ignore_errors=True)
    policy = actors.policy
    probe = Group(prompt.token_ids, (prompt.token_ids,))  # any text will do: the comparison is of log-probs
    expected = _probe_log_probs(policy, probe)
    outputs = {"policy": folder}
    if policy.adapter is None:
        policy.backbone.save(folder, write)
    else:
        policy.backbone.save_adapter(POLICY, adapter_folder, write)
        outputs["adapter"] = adapter_folder
    if not write:
        return outputs
    if policy.adapter is not None:
        copy = Backbone.load(context.input("reference"), device=actors.device, dtype=policy.backbone.base.dtype)
        copy.load_adapter(POLICY, adapter_folder)
        copy.merge_and_save(POLICY, folder)
    written = Network(Backbone.load(folder, device=actors.device, dtype=policy.backbone.base.dtype))
    worst = float((_probe_log_probs(written, probe) - expected).abs().max())
    tolerance = MERGE_TOLERANCE if policy.backbone.base.dtype == torch.float32 else 0.1
    if not worst <= tolerance:
        raise StageError(
            f"{folder}: the saved policy's log-probs differ from the trained one's by up to {worst:.2e} nats"
        )
    return outputs


def _probe_log_probs(network: Network, probe: Group) -> torch.Tensor:
    layout = build_layout([probe], "padded", pad_id(network.backbone.tokenizer)).to(network.backbone.device)
    return network.log_probs(layout)

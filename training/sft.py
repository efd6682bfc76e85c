"""Stage sft: next-token loss on chosen responses. Its model is the frozen reference of everything after it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence

import torch

from configs.schema.models import ModelsConfig
from configs.schema.supervised import SFTConfig
from training.context import StageContext, StageOutcome
from training.examples import Encoder, encode_imitation, read_split
from training.metrics import Mean
from training.models.batching import microbatches
from training.models.layout import Group, build_layout, group_sizes
from training.models.network import Network
from training.models.tokenize import pad_id
from training.models.trained import load_trained
from training.objectives import aggregate
from training.supervised import fit
from training.world import current_world

ADAPTER = "sft"


class ImitationTask:
    """Token-mean negative log-likelihood of responses given their prompts."""

    def __init__(
        self, network: Network, names: Sequence[str], groups: Sequence[Group], held_out: Sequence[Group], budget: int
    ) -> None:
        self.network, self.names, self.groups, self.held_out, self.budget = network, names, groups, held_out, budget
        self.sizes = group_sizes(groups, "padded")

    def count(self, items: Sequence[int]) -> float:
        """Response tokens."""
        return float(sum(len(self.groups[i].responses[0]) for i in items))

    def loss(self, items: Sequence[int], count: float) -> tuple[torch.Tensor, dict[str, Mean]]:
        """Negative log-likelihood over the global number of tokens."""
        layout = build_layout([self.groups[i] for i in items], "padded", pad_id(self.network.backbone.tokenizer))
        layout = layout.to(self.network.backbone.device)
        log_probs = self.network.log_probs(layout)
        loss = aggregate(-log_probs, layout.response_mask, "token-mean", num_tokens=count)
        tokens = float(layout.response_mask.sum())
        return loss, {"loss": Mean(-float(log_probs.detach().double().sum()), tokens)}

    def validate(self) -> dict[str, float]:
        """Loss and perplexity of held-out chosen responses."""
        if not self.held_out:
            return {}
        loss = negative_log_likelihood(self.network, self.held_out, self.budget)
        return {"validation_loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def negative_log_likelihood(network: Network, groups: Sequence[Group], budget: int) -> float:
    """Mean over all response tokens, nats a token."""
    sums = response_nll(network, groups, budget)
    tokens = sum(len(group.responses[0]) for group in groups)
    return sum(sums) / tokens if tokens else 0.0


@torch.no_grad()
def response_nll(network: Network, groups: Sequence[Group], budget: int) -> list[float]:
    """Negative log-likelihood of each group's one response, nats, in order."""
    found = [0.0] * len(groups)
    for batch in microbatches(group_sizes(groups, "padded"), budget):
        layout = build_layout([groups[i] for i in batch], "padded", pad_id(network.backbone.tokenizer))
        sums = network.log_probs(layout.to(network.backbone.device)).double().sum(dim=1).tolist()
        for i, value in zip(batch, sums, strict=True):
            found[i] = -value
    return found


def run(context: StageContext) -> StageOutcome:
    """Train on the snapshot's chosen responses and write a whole, servable model folder."""
    models, config = context.section("models", ModelsConfig), context.section("sft", SFTConfig)
    world = current_world()
    network = load_trained(context.input("base"), ADAPTER, models, config, context.spec.seed, world)
    backbone = network.backbone
    encoder = Encoder(backbone.tokenizer, models)
    names, groups = encode_imitation(read_split(context.input("snapshot"), "train"), encoder)
    _, held_out = encode_imitation(read_split(context.input("snapshot"), "validation"), encoder)
    held_out = held_out[: config.max_validation_rows]
    report = fit(
        ImitationTask(network, names, groups, held_out, config.max_tokens_per_microbatch), config, context, world
    )
    folder, parameters = context.output("model"), backbone.num_parameters()
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    if config.lora_rank:
        backbone.merge_and_save(ADAPTER, folder, write=world.is_main)
    else:
        backbone.save(folder, write=world.is_main)
    metrics = report.validation | {"steps": float(report.steps), "rows": float(len(names))}
    return StageOutcome({"model": folder}, metrics, {"parameters": parameters})

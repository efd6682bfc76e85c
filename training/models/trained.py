"""The network that sft, reward and distill train: a base read from its folder, with an adapter on it or all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from configs.schema.models import ModelsConfig
from configs.schema.supervised import SupervisedConfig
from training.engines.choose import load_spread
from training.models.backbone import Backbone, LoraSettings
from training.models.network import Network, ScalarHead
from training.runtime import pick_device, pick_dtype
from training.world import World

MakeHead = Callable[[int], ScalarHead]
"""A head for hidden states of this width."""


def load_trained(
    folder: Path, adapter: str, models: ModelsConfig, config: SupervisedConfig, seed: int, world: World, *,
    num_layers: int | None = None, goes_on_from: Path | None = None, head: MakeHead | None = None,
) -> Network:  # fmt: skip
    """The base in `folder`, shared among the ranks as the world says: with LoRA a frozen one with a new adapter, or
    with the one in `goes_on_from`; else all its weights are trained. Raises ModelFolderError.
    """
    device = pick_device()
    # Weights that are trained whole stay float32: AdamW on bfloat16 weights loses small updates.
    dtype = pick_dtype(models.dtype, device) if config.lora_rank else torch.float32

    def load(place: torch.device) -> Backbone:
        checkpointing = models.gradient_checkpointing
        loaded = Backbone.load(
            folder, device=place, dtype=dtype, num_layers=num_layers, gradient_checkpointing=checkpointing
        )
        if config.lora_rank and goes_on_from is not None:
            loaded.load_adapter(adapter, goes_on_from, seed)
        elif config.lora_rank:
            settings = LoraSettings(config.lora_rank, config.lora_alpha, config.lora_target_modules)
            loaded.add_adapter(adapter, settings, seed)
        return loaded

    backbone = load_spread(load, device, world)
    made = head(backbone.hidden_size) if head is not None else None
    return Network(backbone, adapter if config.lora_rank else None, made, trains_backbone=not config.lora_rank)

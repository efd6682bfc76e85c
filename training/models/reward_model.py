"""A trained reward model on disk and in memory. The score head travels with the weights; without it none is loaded.

Folder: reward.json, score_head.safetensors, and either a whole model folder (kind `full`) or a PEFT adapter plus the
place and digest of the base it belongs to (kind `lora`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from training.contract import FileRef, file_ref, read_json, write_json
from training.engines.weights import shape_of
from training.errors import ModelFolderError
from training.models.backbone import Backbone
from training.models.batching import microbatches
from training.models.layout import Group, build_layout, group_sizes
from training.models.network import Network, ScalarHead
from training.models.tokenize import pad_id
from training.recorder import Told, untold

REWARD_JSON, HEAD_FILE = "reward.json", "score_head.safetensors"
ADAPTER = "reward"


@dataclass(frozen=True)
class RewardDescription:
    """What one needs to know to score with the model. Scores are in the units of the Bradley-Terry margin (logits)."""

    kind: str  # "full" | "lora"
    heads: int
    aggregate: str  # "mean" | "min" | "mean_minus_variance" | "mean_minus_std"
    uncertainty_penalty: float
    max_prompt_length: int
    max_response_length: int
    chat_template: str
    base: dict[str, Any] | None = None  # {"path", "sha256", "num_layers"} of a lora model
    score_mean: float = 0.0  # over held-out answers, for later normalisation
    score_std: float = 1.0
    temperature: float = 1.0  # margins / temperature are calibrated log-odds
    metrics: dict[str, float] = field(default_factory=dict)


class RewardModel:
    """Scores answers; one float a response, higher is better."""

    def __init__(self, network: Network, description: RewardDescription) -> None:
        self.network = network
        self.description = description

    @classmethod
    def load(cls, folder: Path, *, device: torch.device, dtype: torch.dtype, base: Path | None = None) -> RewardModel:
        """Load strictly. `base` overrides where a lora model's base lies. Raises ModelFolderError."""
        description = _read_description(folder / REWARD_JSON)
        if description.kind == "full":
            backbone, adapter = Backbone.load(folder, device=device, dtype=dtype), None
        else:
            backbone = _load_lora_base(folder, description, base, device, dtype)
            backbone.load_adapter(ADAPTER, folder)
            adapter = ADAPTER
        head = ScalarHead(backbone.hidden_size, description.heads).read(folder / HEAD_FILE)
        return cls(Network(backbone, adapter, head), description)

    def save(self, folder: Path, write: bool = True) -> None:
        """Write everything; the folder is then complete by itself (lora: together with its base).

        Of spread weights every rank saves, and one of them with `write`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self.description.kind == "full":
            self.network.backbone.save(folder, write)
        else:
            self.network.backbone.save_adapter(ADAPTER, folder, write)
        self.network.save_head(folder / HEAD_FILE, write)
        if write:
            write_json(folder / REWARD_JSON, asdict(self.description))

    def described(self, **changes: Any) -> RewardModel:
        """The same model with more said about it."""
        return RewardModel(self.network, replace(self.description, **changes))

    @torch.no_grad()
    def head_scores(
        self, groups: Sequence[Group], budget: int, layout: str = "padded", told: Told = untold
    ) -> torch.Tensor:
        """Scores of every head, [B, k] on the CPU, in the order of the groups' responses. `told` counts groups."""
        offsets, total = [], 0
        for group in groups:
            offsets.append(total)
            total += len(group.responses)
        scores, done = torch.zeros((total, self.description.heads)), 0
        for batch in microbatches(group_sizes(groups, layout), budget):
            chosen = [groups[i] for i in batch]
            laid_out = build_layout(chosen, layout, pad_id(self.network.backbone.tokenizer))
            found = self.network.scores(laid_out.to(self.network.backbone.device)).cpu()
            places = [offsets[i] + j for i in batch for j in range(len(groups[i].responses))]
            scores[places] = found
            done += len(batch)
            told(done)
        return scores

    def scores(
        self, groups: Sequence[Group], budget: int, layout: str = "padded", told: Told = untold
    ) -> torch.Tensor:
        """One score a response, [B]: the heads put together as the description says. `told` counts groups."""
        return self.combine(self.head_scores(groups, budget, layout, told))

    def combine(self, scores: torch.Tensor) -> torch.Tensor:
        """[..., k] -> [...]. Pessimism counters over-optimisation (Coste et al. 2023, eq. 3 and 4)."""
        return combine_heads(scores, self.description.aggregate, self.description.uncertainty_penalty)

    def num_parameters(self) -> int:
        """Weights used in scoring: base, adapter and head."""
        network = self.network
        adapter = 0 if network.adapter is None else sum(shape_of(p).numel() for p in network.parameters().values())
        head = sum(shape_of(p).numel() for p in network.head.parameters()) if network.head is not None else 0
        return network.backbone.num_parameters() + (adapter if network.adapter is not None else head)


def combine_heads(scores: torch.Tensor, aggregate: str, penalty: float) -> torch.Tensor:
    """mean, minimum, or mean minus penalty x variance (or x standard deviation) over the last axis.

    The variance is over k, as in Coste et al. 2023, the standard deviation over k - 1. With one head all are the score
    itself. Raises ValueError for another aggregate: a silent mean would not be pessimistic.
    """
    if aggregate == "min":
        return scores.min(dim=-1).values
    mean = scores.mean(dim=-1)
    if aggregate == "mean_minus_variance":
        return mean - penalty * scores.var(dim=-1, unbiased=False)
    if aggregate not in ("mean", "mean_minus_std"):
        raise ValueError(f"unknown aggregate {aggregate!r} of an ensemble's heads")
    if aggregate == "mean_minus_std" and scores.shape[-1] > 1:
        return mean - penalty * scores.std(dim=-1)
    return mean


def _read_description(file: Path) -> RewardDescription:
    if not file.is_file():
        raise ModelFolderError(f"{file} is missing", "a reward model's folder holds its description and its score head")
    try:
        return RewardDescription(**read_json(file))
    except TypeError as error:
        raise ModelFolderError(f"{file}: not a reward model's description: {error}") from None


def lora_base(ref: FileRef, num_layers: int | None) -> dict[str, Any]:
    """How a lora model remembers its base."""
    return {"path": ref.path, "sha256": ref.sha256, "num_layers": num_layers}


def _load_lora_base(
    folder: Path, description: RewardDescription, override: Path | None, device: torch.device, dtype: torch.dtype
) -> Backbone:
    assert description.base is not None
    place = override or Path(description.base["path"])
    if not place.is_dir():
        raise ModelFolderError(f"{folder}: its base {place} is gone", "pass where the base model lies now")
    if file_ref(place).sha256 != description.base["sha256"]:
        raise ModelFolderError(f"{folder}: {place} is not the base that it was trained on (sha256 differs)")
    return Backbone.load(place, device=device, dtype=dtype, num_layers=description.base["num_layers"])

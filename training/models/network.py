"""A reader of a backbone: which weights it trains, and the thin head on the hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from training.engines.weights import fill, whole_of
from training.errors import ModelFolderError
from training.models.backbone import Backbone
from training.models.layout import Layout
from training.objectives import token_entropy, token_log_probs
from training.seeding import torch_generator


class ScalarHead(nn.Module):
    """k linear scores of a hidden state, in float32 whatever the backbone's type. [..., H] -> [..., k]."""

    def __init__(self, hidden_size: int, outputs: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, hidden_size))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def initialise(self, seed: int, name: str) -> ScalarHead:
        """Small random weights, so that the heads of an ensemble differ. Zero weights are kept for critics.

        A tenth of 1 / sqrt(H): hidden states of real models are large, and a pair must begin near the loss of a coin.
        """
        generator = torch_generator(seed, f"head/{name}")
        with torch.no_grad():
            self.weight.copy_(torch.randn(self.weight.shape, generator=generator) * (0.1 / self.weight.shape[1] ** 0.5))
        return self

    def read(self, file: Path) -> ScalarHead:
        """Take the weights of a head file, strictly. Raises ModelFolderError."""
        if not file.is_file():
            raise ModelFolderError(f"{file} is missing", "a reward model without its score head is none")
        try:
            self.load_state_dict(load_file(file), strict=True)
        except RuntimeError as error:
            raise ModelFolderError(f"{file}: does not fit: {error}") from None
        return self

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of hidden states."""
        return nn.functional.linear(hidden.float(), self.weight, self.bias)


class Network:
    """Policy, critic or reward model: a backbone read with one adapter (or with its own weights) and maybe a head.

    adapter None and trains_backbone False is the frozen reference.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapter: str | None = None,
        head: ScalarHead | None = None,
        trains_backbone: bool = False,
    ) -> None:
        self.backbone = backbone
        self.adapter = adapter
        self.head = head.to(backbone.device) if head is not None else None
        self.trains_backbone = trains_backbone
        if trains_backbone:
            backbone.base.requires_grad_(True)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Everything this reader trains, by name."""
        found: dict[str, nn.Parameter] = {}
        if self.trains_backbone:
            found |= {f"backbone.{name}": p for name, p in self.backbone.base.named_parameters()}
        elif self.adapter is not None:
            found |= {f"adapter.{name}": p for name, p in self.backbone.adapter_parameters(self.adapter).items()}
        if self.head is not None:
            found |= {f"head.{name}": p for name, p in self.head.named_parameters()}
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """A copy of the trained weights, whole, on the CPU. Where they are spread over ranks, every rank asks."""
        return whole_of(self.parameters(), keep=True)

    def settle(self) -> None:
        """Take the head to where the backbone went."""
        if self.head is not None:
            self.head.to(self.backbone.device)

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put weights back, strictly."""
        parameters = self.parameters()
        if set(parameters) != set(tensors):
            odd = sorted(set(parameters) ^ set(tensors))[:3]
            raise ModelFolderError(f"saved weights do not fit the network: {', '.join(odd)}")
        for name, parameter in parameters.items():
            fill(parameter, tensors[name])

    def hidden(self, layout: Layout) -> torch.Tensor:
        """[B, R + 1, H]; see Backbone.hidden."""
        return self.backbone.hidden(layout, self.adapter)

    def logits(self, layout: Layout) -> torch.Tensor:
        """Logits that predict each response token, [B, R, V]."""
        return self.backbone.read(lambda: self.backbone.logits(self.hidden(layout)[:, :-1]))

    def log_probs(self, layout: Layout) -> torch.Tensor:
        """log pi(token | before), [B, R] float32, 0 in masked slots."""
        return _select(token_log_probs(self.logits(layout), layout.response_ids), layout)

    def log_probs_and_entropy(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Both from one forward, [B, R] each."""
        logits = self.logits(layout)
        return _select(token_log_probs(logits, layout.response_ids), layout), _select(token_entropy(logits), layout)

    def values(self, layout: Layout) -> torch.Tensor:
        """V(state before response token r), [B, R] float32, 0 in masked slots. Needs a head with one output."""
        assert self.head is not None
        return _select(self.head(self.hidden(layout)[:, :-1]).squeeze(-1), layout)

    def scores(self, layout: Layout) -> torch.Tensor:
        """Head outputs at the last valid response token, [B, k]. Pooled by mask, never by pad id."""
        assert self.head is not None
        last = layout.response_mask.sum(dim=1)
        pooled = self.hidden(layout)[torch.arange(len(last), device=last.device), last]
        scores: torch.Tensor = self.head(pooled)
        return scores

    def save_head(self, file: Path, write: bool = True) -> None:
        """Write the head as safetensors. Of a spread one every rank saves, and one of them with `write`."""
        assert self.head is not None
        found = whole_of(dict(self.head.named_parameters()), keep=write)
        if write:
            save_file({name: tensor.contiguous() for name, tensor in found.items()}, file)


def _select(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    return torch.where(layout.response_mask, values, torch.zeros((), device=values.device))

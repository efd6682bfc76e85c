"""Networks on the tiny Llama, with weights that are not zero where training would have moved them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from training.models.backbone import Backbone, LoraSettings
from training.models.network import Network, ScalarHead
from training.seeding import torch_generator

CPU = torch.device("cpu")


def stir(parameters: dict[str, torch.nn.Parameter], seed: int, scale: float = 0.2) -> None:
    """Add seeded noise: an adapter fresh from its initialisation says nothing."""
    draws = torch_generator(seed, "stir")
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=draws))


@pytest.fixture
def load(base_folder: Path) -> Callable[..., Backbone]:
    """A freshly loaded tiny backbone."""
    return lambda **options: Backbone.load(base_folder, device=CPU, **options)


@pytest.fixture(scope="session")
def stirred_network(base_folder: Path) -> Network:
    """Read only: adapter `first` with weights of its own, and a head of two outputs."""
    backbone = Backbone.load(base_folder, device=CPU)
    backbone.add_adapter("first", LoraSettings(4, 8.0), seed=1)
    network = Network(backbone, "first", ScalarHead(backbone.hidden_size, 2).initialise(1, "test"))
    stir(network.parameters(), seed=1)
    return network


@pytest.fixture(scope="session")
def critic_network(stirred_network: Network) -> Network:
    """The same weights read with one head: a critic."""
    head = ScalarHead(stirred_network.backbone.hidden_size).initialise(2, "critic")
    return Network(stirred_network.backbone, "first", head)

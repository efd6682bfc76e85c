"""Readers of a backbone: what they train, what they copy, and heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.models.conftest import CPU, stir
from training.errors import ModelFolderError
from training.models.backbone import Backbone, LoraSettings
from training.models.layout import Group, build_layout
from training.models.network import Network, ScalarHead

LAYOUT = build_layout([Group((1, 5, 9), ((7, 8, 2), (3, 2)))], "padded", 0)


@pytest.fixture
def backbone(base_folder: Path) -> Backbone:
    return Backbone.load(base_folder, device=CPU)


def test_the_frozen_reference_trains_nothing(backbone: Backbone):
    reference = Network(backbone)
    assert reference.parameters() == {}
    assert not reference.log_probs(LAYOUT).requires_grad


def test_an_adapter_with_a_head_trains_both_and_nothing_else(backbone: Backbone):
    backbone.add_adapter("first", LoraSettings(4, 8.0), 1)
    backbone.add_adapter("second", LoraSettings(4, 8.0), 2)
    names = set(Network(backbone, "first", ScalarHead(32)).parameters())
    assert {"head.weight", "head.bias"} < names
    rest = names - {"head.weight", "head.bias"}
    assert rest
    assert all(name.startswith("adapter.") and ".first." in name and ".lora_" in name for name in rest)


def test_full_training_names_each_weight_once(backbone: Backbone):
    network = Network(backbone, trains_backbone=True)
    assert sum(p.numel() for p in network.parameters().values()) == backbone.num_parameters()
    network.log_probs(LAYOUT).sum().backward()
    assert all(p.grad is not None for p in network.parameters().values())


def test_tensors_are_copies_that_go_back_bit_for_bit(backbone: Backbone):
    network = Network(backbone, head=ScalarHead(32).initialise(1, "x"), trains_backbone=True)
    kept = network.tensors()
    expected = network.scores(LAYOUT).detach()
    stir(network.parameters(), 1)
    assert not torch.equal(network.scores(LAYOUT).detach(), expected)
    network.load_tensors(kept)
    assert torch.equal(network.scores(LAYOUT).detach(), expected)


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_tensors_of_another_network_are_refused(backbone: Backbone, change: str):
    network = Network(backbone, head=ScalarHead(32), trains_backbone=True)
    tensors = network.tensors()
    if change == "missing":
        del tensors["head.bias"]
    else:
        tensors["head.surprise"] = torch.ones(1)
    with pytest.raises(ModelFolderError, match=r"do not fit the network: head\.(bias|surprise)"):
        network.load_tensors(tensors)


def test_a_critics_head_starts_at_zero_and_an_ensembles_apart():
    assert not ScalarHead(8).weight.any()
    heads = ScalarHead(64, 4).initialise(1, "reward").weight.detach()
    assert (heads - heads[0])[1:].abs().max(dim=1).values.min() > 0.01
    assert float(heads.norm(dim=1).max()) < 0.2, "a pair must begin near the loss of a coin, however large its states"
    assert torch.equal(heads, ScalarHead(64, 4).initialise(1, "reward").weight)
    assert not torch.equal(heads, ScalarHead(64, 4).initialise(2, "reward").weight)
    assert not torch.equal(heads, ScalarHead(64, 4).initialise(1, "student").weight)


def test_heads_score_in_float32_whatever_the_backbone(base_folder: Path):
    backbone = Backbone.load(base_folder, device=CPU, dtype=torch.bfloat16)
    network = Network(backbone, head=ScalarHead(32).initialise(1, "x"))
    assert network.scores(LAYOUT).dtype == torch.float32
    assert network.values(LAYOUT).dtype == torch.float32
    assert network.log_probs(LAYOUT).dtype == torch.float32
    exact = Network(Backbone.load(base_folder, device=CPU)).log_probs(LAYOUT)
    torch.testing.assert_close(network.log_probs(LAYOUT), exact, atol=0.1, rtol=0.05)


def test_bfloat16_layouts_agree(base_folder: Path):
    """The block mask survives the narrower type: nobody sees a sibling."""
    network = Network(Backbone.load(base_folder, device=CPU, dtype=torch.bfloat16))
    groups = [Group((1, 5, 9), ((7, 8, 2), (3, 2)))]
    padded, shared = (network.log_probs(build_layout(groups, kind, 0)) for kind in ("padded", "shared"))
    assert torch.isfinite(shared).all()
    torch.testing.assert_close(padded, shared, atol=0.05, rtol=0.05)


def test_one_forward_gives_log_probs_and_entropy(backbone: Backbone):
    network = Network(backbone)
    log_probs, entropy = network.log_probs_and_entropy(LAYOUT)
    assert torch.equal(log_probs, network.log_probs(LAYOUT))
    spread = network.logits(LAYOUT).double().log_softmax(dim=-1)
    expected = -(spread.exp() * spread).sum(dim=-1)
    valid = LAYOUT.response_mask
    torch.testing.assert_close(entropy.double()[valid], expected[valid], atol=1e-5, rtol=0)
    assert (entropy[~valid] == 0).all()


def test_scores_and_values_need_a_head(backbone: Backbone):
    for read in (Network(backbone).scores, Network(backbone).values):
        with pytest.raises(AssertionError):
            read(LAYOUT)


def test_a_head_reads_what_was_saved(backbone: Backbone, tmp_path: Path):
    head = ScalarHead(32, 3).initialise(1, "x")
    Network(backbone, head=head).save_head(tmp_path / "head.safetensors")
    again = ScalarHead(32, 3).read(tmp_path / "head.safetensors")
    assert torch.equal(again.weight, head.weight)
    assert torch.equal(again.bias, head.bias)
    with pytest.raises(ModelFolderError, match=r"gone.safetensors is missing"):
        ScalarHead(32).read(tmp_path / "gone.safetensors")

"""Laws of reward models: a score depends on its prompt and answer alone, and the head travels with the weights."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.training.models.conftest import CPU, stir
from training.contract import file_ref, read_json, write_json
from training.errors import ModelFolderError
from training.models.backbone import Backbone, LoraSettings
from training.models.layout import Group
from training.models.network import Network, ScalarHead
from training.models.reward_model import (
    ADAPTER,
    HEAD_FILE,
    REWARD_JSON,
    RewardDescription,
    RewardModel,
    combine_heads,
    lora_base,
)

GROUPS = [Group((1, 5, 9), ((7, 8, 2), (3, 2))), Group((1, 44), ((60, 61, 62, 2), (2,))), Group((1,) * 9, ((4, 2),))]
BUDGET = 256
TOLERANCE = 1e-5


def description(kind: str, heads: int = 2, aggregate: str = "mean_minus_std", **more: object) -> RewardDescription:
    return RewardDescription(kind, heads, aggregate, 0.5, 48, 24, "auto", **more)


@pytest.fixture(scope="module")
def full_model(base_folder: Path) -> RewardModel:
    backbone = Backbone.load(base_folder, device=CPU)
    network = Network(backbone, head=ScalarHead(backbone.hidden_size, 2).initialise(1, "full"), trains_backbone=True)
    stir(network.parameters(), 3, scale=0.05)
    return RewardModel(network, description("full", score_mean=0.25, score_std=2.0, temperature=1.5))


@pytest.fixture(scope="module")
def lora_model(base_folder: Path) -> RewardModel:
    backbone = Backbone.load(base_folder, device=CPU, num_layers=1)
    backbone.add_adapter(ADAPTER, LoraSettings(4, 8.0), 1)
    network = Network(backbone, ADAPTER, ScalarHead(backbone.hidden_size, 2).initialise(1, "lora"))
    stir(network.parameters(), 4)
    return RewardModel(network, description("lora", base=lora_base(file_ref(base_folder), 1)))


@pytest.fixture(params=["full", "lora"])
def model(request: pytest.FixtureRequest, full_model: RewardModel, lora_model: RewardModel) -> RewardModel:
    return full_model if request.param == "full" else lora_model


def load(folder: Path, **options: object) -> RewardModel:
    return RewardModel.load(folder, device=CPU, dtype=torch.float32, **options)


LAYOUTS = st.sampled_from(["padded", "shared", "packed"])
tokens = st.lists(st.integers(0, 299), min_size=1, max_size=8).map(tuple)
groups_strategy = st.lists(
    st.builds(Group, tokens, st.lists(tokens, min_size=1, max_size=3).map(tuple)), min_size=1, max_size=5
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=groups_strategy, budget=st.integers(60, 400), kind=LAYOUTS, data=st.data())
def test_neither_order_nor_batch_nor_layout_moves_a_score(full_model, groups, budget, kind, data):
    expected = [full_model.head_scores([g], 1_000) for g in groups]
    order = data.draw(st.permutations(range(len(groups))))
    found = full_model.head_scores([groups[i] for i in order], budget, kind)
    torch.testing.assert_close(found, torch.cat([expected[i] for i in order]), atol=TOLERANCE, rtol=0)


def test_scores_come_back_in_the_order_asked(full_model):
    """Longest first inside, the caller's order outside."""
    groups = [Group((1,) * n, ((5,) * m,)) for n, m in ((2, 1), (9, 4), (3, 8), (5, 2))]
    alone = torch.cat([full_model.scores([g], BUDGET) for g in groups])
    assert alone.unique().numel() == 4
    torch.testing.assert_close(full_model.scores(groups, 20), alone, atol=TOLERANCE, rtol=0)


def test_neither_the_tokenizers_padding_side_nor_its_pad_token_moves_a_score(full_model):
    """A reward model pooled by pad id reads another token where the pad is the end token, or stands on the left."""
    tokenizer = full_model.network.backbone.tokenizer
    kept = tokenizer.padding_side, tokenizer.pad_token
    expected = torch.cat([full_model.head_scores([group], BUDGET) for group in GROUPS])
    try:
        for side in ("left", "right"):
            for pad in (tokenizer.eos_token, tokenizer.bos_token, None):
                tokenizer.padding_side, tokenizer.pad_token = side, pad
                found = full_model.head_scores(GROUPS, BUDGET)
                torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    finally:
        tokenizer.padding_side, tokenizer.pad_token = kept


def test_scoring_leaves_no_gradient(full_model):
    assert not full_model.scores(GROUPS, BUDGET).requires_grad


def test_a_model_survives_disk(model: RewardModel, tmp_path: Path):
    expected = model.head_scores(GROUPS, BUDGET)
    model.save(tmp_path / "reward")
    again = load(tmp_path / "reward")
    assert again.description == model.description
    assert torch.equal(again.head_scores(GROUPS, BUDGET), expected)
    assert again.num_parameters() == model.num_parameters()
    assert not [f for f in tmp_path.rglob("*") if f.suffix in (".bin", ".pt", ".pkl")]


def test_a_lora_model_is_small_and_names_its_base(lora_model: RewardModel, base_folder: Path, tmp_path: Path):
    lora_model.save(tmp_path / "reward")
    assert not (tmp_path / "reward" / "model.safetensors").exists()
    expected = {"path": str(base_folder), "sha256": file_ref(base_folder).sha256, "num_layers": 1}
    assert load(tmp_path / "reward").description.base == expected


def test_merged_scores_are_the_adapters(lora_model: RewardModel, base_folder: Path, tmp_path: Path):
    """Fold a copy of the adapter into the weights, keep the head: the scores stay within 1e-4."""
    expected = lora_model.scores(GROUPS, BUDGET)
    lora_model.save(tmp_path / "reward")
    load(tmp_path / "reward").network.backbone.merge_and_save(ADAPTER, tmp_path / "merged")
    shutil.copy(tmp_path / "reward" / HEAD_FILE, tmp_path / "merged" / HEAD_FILE)
    write_json(tmp_path / "merged" / REWARD_JSON, asdict(lora_model.description) | {"kind": "full", "base": None})
    merged = load(tmp_path / "merged").scores(GROUPS, BUDGET)
    assert float((merged - expected).abs().max()) <= 1e-4
    plain = Backbone.load(base_folder, device=CPU, num_layers=1)
    head = lora_model.network.head
    off = RewardModel(Network(plain, head=head), lora_model.description).scores(GROUPS, BUDGET)
    assert float((merged - off).abs().max()) > 1e-2


@pytest.mark.parametrize("lost", [HEAD_FILE, REWARD_JSON])
def test_a_model_without_its_head_or_description_is_none(model: RewardModel, tmp_path: Path, lost: str):
    model.save(tmp_path / "reward")
    (tmp_path / "reward" / lost).unlink()
    with pytest.raises(ModelFolderError, match=f"{lost} is missing") as error:
        load(tmp_path / "reward")
    assert str(tmp_path / "reward") in str(error.value)


def test_a_lora_model_without_its_adapter_is_none(lora_model: RewardModel, tmp_path: Path):
    lora_model.save(tmp_path / "reward")
    (tmp_path / "reward" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"adapter_model.safetensors: missing"):
        load(tmp_path / "reward")


@pytest.mark.parametrize("change", ["drop", "reshape", "heads"])
def test_a_head_that_does_not_fit_is_refused(full_model: RewardModel, tmp_path: Path, change: str):
    full_model.save(tmp_path / "reward")
    file = tmp_path / "reward" / HEAD_FILE
    weights = load_file(file)
    if change == "drop":
        del weights["bias"]
    elif change == "reshape":
        weights["weight"] = weights["weight"][:, :-1].clone()
    else:
        weights = {name: tensor[:1].clone() for name, tensor in weights.items()}
    save_file(weights, file)
    with pytest.raises(ModelFolderError, match=HEAD_FILE):
        load(tmp_path / "reward")


def test_a_description_of_another_version_is_refused(full_model: RewardModel, tmp_path: Path):
    full_model.save(tmp_path / "reward")
    file = tmp_path / "reward" / REWARD_JSON
    content = read_json(file)
    del content["heads"]
    file.write_text(json.dumps(content | {"surprise": 1}))
    with pytest.raises(ModelFolderError, match=REWARD_JSON):
        load(tmp_path / "reward")


def test_a_lora_models_base_may_move_but_not_change(lora_model: RewardModel, base_folder: Path, tmp_path: Path):
    lora_model.save(tmp_path / "reward")
    file = tmp_path / "reward" / REWARD_JSON
    content = read_json(file)
    content["base"]["path"] = str(tmp_path / "gone")
    write_json(file, content)
    with pytest.raises(ModelFolderError, match=r"gone is gone(.|\n)*pass where the base model lies"):
        load(tmp_path / "reward")
    moved = Path(shutil.copytree(base_folder, tmp_path / "moved"))
    assert torch.equal(load(tmp_path / "reward", base=moved).scores(GROUPS, BUDGET), lora_model.scores(GROUPS, BUDGET))
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match="not the base that it was trained on"):
        load(tmp_path / "reward", base=moved)


def test_aggregates_by_hand():
    scores = torch.tensor([[1.0, 3.0, 5.0], [0.0, 0.0, 0.0], [-1.0, 2.0, -4.0]])
    assert combine_heads(scores, "mean", 9.0).tolist() == pytest.approx([3.0, 0.0, -1.0])
    assert combine_heads(scores, "min", 9.0).tolist() == [1.0, 0.0, -4.0]
    assert combine_heads(scores, "mean_minus_std", 0.5).tolist() == pytest.approx([2.0, 0.0, -1 - 0.5 * 3.0])
    # squared deviations 4 + 0 + 4 and 0 + 9 + 9, over the three heads
    assert combine_heads(scores, "mean_minus_variance", 0.5).tolist() == pytest.approx([3 - 4 / 3, 0.0, -1 - 3.0])
    with pytest.raises(ValueError, match="unknown aggregate 'median'"):
        combine_heads(scores, "median", 0.5)


@settings(deadline=None)
@given(values=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=5), penalty=st.floats(0, 3))
def test_pessimism_never_exceeds_the_mean(values, penalty):
    scores = torch.tensor([values])
    mean = float(combine_heads(scores, "mean", penalty))
    for aggregate in ("min", "mean_minus_variance", "mean_minus_std"):
        found = float(combine_heads(scores, aggregate, penalty))
        assert math.isfinite(found)
        assert found <= mean + 1e-5
    agreed = scores[:, :1].expand(1, len(values))
    for aggregate in ("mean", "min", "mean_minus_variance", "mean_minus_std"):
        assert float(combine_heads(agreed, aggregate, penalty)) == pytest.approx(values[0], abs=1e-5)


def test_parameters_used_in_scoring_are_counted(full_model: RewardModel, lora_model: RewardModel):
    head = 2 * 32 + 2
    assert full_model.num_parameters() == full_model.network.backbone.num_parameters() + head
    adapter = sum(p.numel() for p in lora_model.network.backbone.adapter_parameters(ADAPTER).values())
    assert adapter > 0
    assert lora_model.num_parameters() == lora_model.network.backbone.num_parameters() + adapter + head

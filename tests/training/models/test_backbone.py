"""Laws of the backbone: adapters off is the base, adapters travel whole, folders that are not whole are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.training.models.conftest import CPU, stir
from training.errors import ModelFolderError
from training.models.backbone import ADAPTER_WEIGHTS, Backbone, LoraSettings
from training.models.layout import Group, build_layout
from training.models.network import Network

Load = Callable[..., Backbone]
GROUPS = [Group((1, 5, 9), ((7, 8, 2), (3, 2))), Group((1, 44), ((60, 61, 62, 2),))]


def logits(backbone: Backbone, adapter: str | None) -> torch.Tensor:
    with torch.no_grad():
        return Network(backbone, adapter).logits(build_layout(GROUPS, "padded", 0))


def with_adapter(load: Load, name: str = "first", seed: int = 1, **options: object) -> Backbone:
    backbone = load()
    backbone.add_adapter(name, LoraSettings(4, 8.0, **options), seed)
    stir(backbone.adapter_parameters(name), seed)
    return backbone


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def test_adapters_off_is_the_base_bit_for_bit(load: Load):
    plain = logits(load(), None)
    backbone = with_adapter(load)
    assert torch.equal(logits(backbone, None), plain)
    assert not torch.allclose(logits(backbone, "first"), plain, atol=1e-2)
    assert torch.equal(logits(backbone, None), plain), "reading with an adapter left something behind"


def test_a_new_adapter_says_nothing_yet(load: Load):
    backbone = load()
    backbone.add_adapter("first", LoraSettings(4, 8.0), seed=1)
    assert torch.equal(logits(backbone, "first"), logits(load(), None))


def test_an_adapters_weights_follow_its_seed_alone(load: Load):
    def fresh(seed: int) -> dict[str, torch.Tensor]:
        backbone = load()
        torch.rand(3)  # the global generator must not matter
        backbone.add_adapter("first", LoraSettings(4, 8.0), seed)
        return Network(backbone, "first").tensors()

    one, same, other = fresh(1), fresh(1), fresh(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_the_global_generator_is_left_alone(load: Load):
    backbone, state = load(), torch.get_rng_state()
    backbone.add_adapter("first", LoraSettings(4, 8.0), seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_two_adapters_do_not_disturb_one_another(load: Load):
    alone = {name: logits(with_adapter(load, name, seed), name) for name, seed in (("first", 1), ("second", 2))}
    both = with_adapter(load, "first", 1)
    both.add_adapter("second", LoraSettings(4, 8.0), 2)
    stir(both.adapter_parameters("second"), 2)
    for name in ("first", "second", "first"):
        assert torch.equal(logits(both, name), alone[name])
    with torch.no_grad():
        for parameter in both.adapter_parameters("second").values():
            parameter.fill_(9.0)
    assert torch.equal(logits(both, "first"), alone["first"])
    assert torch.equal(logits(both, None), logits(load(), None))


def test_two_adapters_of_different_rank(load: Load):
    both = with_adapter(load, "first", 1)
    expected = logits(both, "first")
    both.add_adapter("second", LoraSettings(2, 16.0), 2)
    assert torch.equal(logits(both, "first"), expected)
    assert {p.shape[0] for n, p in both.adapter_parameters("second").items() if "lora_A" in n} == {2}


def test_each_adapter_gets_its_own_gradient_only(load: Load):
    both = with_adapter(load, "first", 1)
    both.add_adapter("second", LoraSettings(4, 8.0), 2)
    stir(both.adapter_parameters("second"), 2)
    layout = build_layout(GROUPS, "padded", 0)
    for trained, other in (("first", "second"), ("second", "first")):
        Network(both, trained).log_probs(layout).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in both.adapter_parameters(trained).values())
        assert all(p.grad is None for p in both.adapter_parameters(other).values())
        both.base.zero_grad(set_to_none=True)
    frozen = [p for name, p in both.base.named_parameters() if ".lora_" not in name]
    assert frozen
    assert not any(p.requires_grad for p in frozen)


def test_an_adapter_survives_disk_bit_for_bit(load: Load, tmp_path: Path):
    backbone = with_adapter(load)
    backbone.save_adapter("first", tmp_path / "adapter")
    assert (tmp_path / "adapter" / ADAPTER_WEIGHTS).is_file()
    assert not list(tmp_path.rglob("*.bin"))
    again = load()
    again.load_adapter("elsewhere", tmp_path / "adapter")
    assert torch.equal(logits(again, "elsewhere"), logits(backbone, "first"))


def test_an_adapters_files_do_not_depend_on_the_process(load: Load, tmp_path: Path):
    """PEFT keeps target modules in a set, and sets of strings have another order in every process."""
    backbone = with_adapter(load)
    backbone.save_adapter("first", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert len(config["target_modules"]) > 1
    assert config["target_modules"] == sorted(config["target_modules"])
    assert list(config) == sorted(config)


@pytest.mark.parametrize("name", ["first", "default"])
def test_a_saved_adapter_is_one_that_peft_reads(load: Load, base_folder: Path, tmp_path: Path, name: str):
    from peft import PeftModel

    backbone = with_adapter(load, name)
    backbone.save_adapter(name, tmp_path / "adapter")
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), str(tmp_path / "adapter"))
    ids = torch.tensor([[1, 5, 9, 7, 8, 2]])
    with torch.no_grad(), backbone.reading(name):
        torch.testing.assert_close(plain.eval()(input_ids=ids).logits, backbone.base(input_ids=ids).logits)


def test_saving_one_adapter_leaves_the_other_out(load: Load, tmp_path: Path):
    both = with_adapter(load, "first", 1)
    both.add_adapter("second", LoraSettings(4, 8.0), 2)
    both.save_adapter("second", tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert len(names) == len(both.adapter_parameters("second"))
    assert not list((tmp_path / "adapter").glob("first*"))


def test_an_adapter_of_another_kind_is_read_as_it_was_trained(load: Load, base_folder: Path, tmp_path: Path):
    """A user's adapter may scale by alpha / sqrt(rank) or train some layers only: the scores must be its own."""
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True, rank_pattern={"q_proj": 2},
        lora_dropout=0.3, task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base_folder), config)
    stir({n: p for n, p in theirs.named_parameters() if "lora_" in n}, 5)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    ids = torch.tensor([[1, 5, 9, 7, 8, 2]])
    ours = load()
    ours.load_adapter("policy", tmp_path / "adapter")
    with torch.no_grad(), ours.reading("policy"):
        torch.testing.assert_close(ours.base(input_ids=ids).logits, theirs.eval()(input_ids=ids).logits)


def test_merged_answers_like_the_adapter(load: Load, tmp_path: Path):
    backbone = with_adapter(load)
    expected, plain = logits(backbone, "first"), logits(load(), None)
    backbone.merge_and_save("first", tmp_path / "merged")
    merged = logits(Backbone.load(tmp_path / "merged", device=CPU), None)
    assert float((merged - expected).abs().max()) <= 1e-4
    assert float((merged - plain).abs().max()) > 1e-2, "merged weights equal the base's"


def test_a_merged_folder_is_a_plain_model_folder(load: Load, tmp_path: Path):
    with_adapter(load).merge_and_save("first", tmp_path / "merged")
    names = load_file(tmp_path / "merged" / "model.safetensors")
    assert not any(".lora_" in name or "base_layer" in name for name in names)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert not list((tmp_path / "merged").glob("*.bin"))


def test_cutting_layers_keeps_the_first_ones(load: Load, base_folder: Path, tmp_path: Path):
    cut = load(num_layers=1)
    assert len(cut.base.model.layers) == 1
    for name, tensor in cut.base.model.layers[0].state_dict().items():
        assert torch.equal(tensor, load_file(base_folder / "model.safetensors")[f"model.layers.0.{name}"])
    assert cut.num_parameters() < load().num_parameters()
    cut.save(tmp_path / "cut")
    assert torch.equal(logits(Backbone.load(tmp_path / "cut", device=CPU), None), logits(cut, None))


def test_more_layers_than_there_are(load: Load):
    with pytest.raises(ModelFolderError, match="has 2 layers, 3 were asked for"):
        load(num_layers=3)


def test_parameters_are_counted_without_adapters(load: Load, base_folder: Path):
    weights = sum(t.numel() for t in load_file(base_folder / "model.safetensors").values())
    backbone = load()
    assert backbone.num_parameters() == weights
    backbone.add_adapter("first", LoraSettings(4, 8.0), 1)
    assert backbone.num_parameters() == weights
    assert backbone.hidden_size == 32


def test_gradient_checkpointing_recomputes_and_changes_nothing(load: Load):
    """A layer runs once more in the backward pass, and the gradients are the same."""
    layout = build_layout(GROUPS, "padded", 0)
    gradients, calls = {}, {}
    for checkpointing in (False, True):
        backbone = load(gradient_checkpointing=checkpointing)
        backbone.add_adapter("first", LoraSettings(4, 8.0), 1)
        stir(backbone.adapter_parameters("first"), 1)
        count = [0]
        layer = backbone.base.model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        Network(backbone, "first").log_probs(layout).sum().backward()
        calls[checkpointing] = count[0]
        gradients[checkpointing] = {n: p.grad for n, p in backbone.adapter_parameters("first").items()}
    assert calls == {False: 1, True: 2}
    for name, gradient in gradients[False].items():
        torch.testing.assert_close(gradients[True][name], gradient)

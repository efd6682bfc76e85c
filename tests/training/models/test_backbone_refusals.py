"""What loading refuses: folders that are not whole, weights too many, adapters of another model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.models.conftest import CPU
from tests.training.models.test_backbone import Load, copied, with_adapter
from training.errors import ModelFolderError
from training.models.backbone import ADAPTER_WEIGHTS, Backbone


def _drop_weight(folder: Path, keep: Callable[[str], bool]) -> None:
    weights = {n: t for n, t in load_file(folder / "model.safetensors").items() if keep(n)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _pickle_only(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "evil.Config"}}))


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES = {
    "pickle": (_pickle_only, r"only pickle weights \(pytorch_model.bin\)(.|\n)*save_pretrained"),
    "weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    "tokenizer": (_no_tokenizer, r"no tokenizer(.|\n)*tokenizer.save_pretrained"),
    "config": (lambda f: (f / "config.json").unlink(), r"config.json: missing"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), r"config.json: not valid JSON"),
    "own code": (_own_code, "asks for code of its own"),
    "shard": (_missing_shard, r"shards missing: model-00001"),
    "one weight": (lambda f: _drop_weight(f, lambda n: "norm" not in n), r"weights missing: model.layers.0"),
    "folder": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_not_whole_is_refused(base_folder: Path, tmp_path: Path, damage: str):
    folder = copied(base_folder, tmp_path / "model")
    spoil, message = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(ModelFolderError, match=message) as error:
        Backbone.load(folder, device=CPU)
    assert str(tmp_path) in str(error.value)


def test_a_weight_left_over_is_refused(base_folder: Path, tmp_path: Path):
    folder = copied(base_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors") | {"model.extra.weight": torch.ones(2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"weights left over: model.extra.weight"):
        Backbone.load(folder, device=CPU)


def test_cutting_layers_excuses_no_other_left_over(base_folder: Path, tmp_path: Path):
    folder = copied(base_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors") | {"model.extra.weight": torch.ones(2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"weights left over: model.extra.weight"):
        Backbone.load(folder, device=CPU, num_layers=1)


def _adapter_folder(load: Load, folder: Path) -> Path:
    with_adapter(load).save_adapter("first", folder)
    return folder


def test_an_adapter_without_weights_is_refused(load: Load, tmp_path: Path):
    folder = _adapter_folder(load, tmp_path / "adapter")
    (folder / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ModelFolderError, match=rf"{ADAPTER_WEIGHTS}: missing"):
        load().load_adapter("first", folder)


def test_an_adapter_without_its_config_is_refused(load: Load, tmp_path: Path):
    folder = _adapter_folder(load, tmp_path / "adapter")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"adapter_config.json"):
        load().load_adapter("first", folder)


@pytest.mark.parametrize("change", ["drop", "add"])
def test_an_adapter_that_does_not_fit_is_refused(load: Load, tmp_path: Path, change: str):
    folder = _adapter_folder(load, tmp_path / "adapter")
    weights = load_file(folder / ADAPTER_WEIGHTS)
    name = sorted(weights)[0]
    if change == "drop":
        del weights[name]
    else:
        weights["x.lora_A.weight"] = torch.ones(2)
    save_file(weights, folder / ADAPTER_WEIGHTS)
    with pytest.raises(ModelFolderError, match="does not fit"):
        load().load_adapter("first", folder)


def test_an_adapter_of_a_deeper_model_is_refused(load: Load, tmp_path: Path):
    folder = _adapter_folder(load, tmp_path / "adapter")
    with pytest.raises(ModelFolderError, match="does not fit"):
        load(num_layers=1).load_adapter("first", folder)


def test_an_adapter_of_other_shapes_is_refused(load: Load, tmp_path: Path):
    folder = _adapter_folder(load, tmp_path / "adapter")
    weights = load_file(folder / ADAPTER_WEIGHTS)
    wider = {n: torch.cat([t, t], dim=1) if "lora_A" in n else t for n, t in weights.items()}
    save_file(wider, folder / ADAPTER_WEIGHTS)
    with pytest.raises(ModelFolderError, match="does not fit"):
        load().load_adapter("first", folder)

"""Damaged model folders: what a broken copy, a forgotten git-LFS pull or a mixed-up folder leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model_files import WEIGHTS, write_model_folder, write_safetensors
from training.errors import ModelFolderError
from training.models.folder import check_model_folder

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"


def cut(file: Path, keep: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def header(changes: Callable[[dict], None]) -> Callable[[Path], object]:
    """Spoil the header of the weights, and leave their bytes as they are."""

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        said = json.loads(content[8 : 8 + length])
        changes(said)
        new = json.dumps(said).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])

    return spoil


def shards(weight_map: dict[str, str], *written: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name in written:
            write_safetensors(folder / name, {"a": (2,)})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return spoil


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: write_model_folder(folder, **changes)


def empty_shard(folder: Path) -> None:
    shards({"a": "1.safetensors"}, "1.safetensors")(folder)
    (folder / "1.safetensors").write_bytes(b"")


Q = "model.layers.0.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (text("model.safetensors", POINTER), r"model\.safetensors: a git-LFS pointer of \d+ b(.|\n)*lfs pull"),
    "tokenizer pointer": (text("tokenizer.json", POINTER), r"tokenizer\.json: a git-LFS pointer"),
    "empty": (text("model.safetensors", ""), r"model\.safetensors: empty \(0 bytes\)"),
    "cut in its data": (lambda f: cut(f / "model.safetensors", 0.9), r"model\.safetensors: damaged or cut off"),
    "cut in its header": (lambda f: cut(f / "model.safetensors", 0.2), r"model\.safetensors: damaged or cut off"),
    "a few bytes": (text("model.safetensors", "abc"), r"model\.safetensors: damaged or cut off \(3 bytes\)"),
    "a web page": (text("model.safetensors", "<!doctype html>" * 9), r"model\.safetensors: damaged or cut off"),
    "too long": (lambda f: (f / "model.safetensors").open("ab").write(b"0000"), r"damaged or cut off"),
    "overlap": (header(lambda h: h[Q].update(data_offsets=[0, 256])), r"damaged or cut off"),
    "other shape": (header(lambda h: h[Q].update(shape=[8, 9])), r"damaged or cut off"),
    "missing shard": (shards({"a": "1.safetensors", "b": "2.safetensors"}, "1.safetensors"), r"shards missing: 2\.saf"),
    "shard without its weight": (
        shards({"a": "1.safetensors", "b": "1.safetensors"}, "1.safetensors"), r"1\.safetensors: lacks b, which",
    ),
    "empty shard": (empty_shard, r"1\.safetensors: empty"),
    "no tokenizer model": (text("tokenizer.json", "{}"), r"tokenizer\.json: holds no tokenizer"),
    "broken tokenizer": (text("tokenizer.json", '{"model": {'), r"tokenizer\.json: not valid JSON"),
    "broken settings": (text("generation_config.json", "{"), r"generation_config\.json: not valid JSON"),
    "empty config": (text("config.json", ""), r"config\.json: empty"),
    "binary config": (lambda f: (f / "config.json").write_bytes(b"\xff{}"), r"config\.json: not valid JSON"),
    "no architectures": (config(architectures=None), r"config\.json: no architectures"),
    "empty architectures": (config(architectures=[]), r"config\.json: no architectures"),
    "no width": (config(hidden_size=None), r"config\.json: no hidden_size"),
    "neither": (config(hidden_size="8", architectures="x"), r"no architectures and no hidden_size"),
}  # fmt: skip


def test_the_stand_in_is_whole(tmp_path: Path):
    found = check_model_folder(write_model_folder(tmp_path))
    assert found.max_positions == 4096
    assert found.matrices == {name.removesuffix(".weight") for name, shape in WEIGHTS.items() if len(shape) == 2}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, damage: str):
    folder = write_model_folder(tmp_path / "model")
    check_model_folder(folder)
    spoil, words = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(ModelFolderError, match=words) as refused:
        check_model_folder(folder, "models.student")
    assert str(refused.value).startswith("models.student: ")
    assert refused.value.hint, "every refusal says the way out"


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({}, 4096),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}}, 4096),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
        ({"hidden_size": None, "text_config": {"hidden_size": 8, "max_position_embeddings": 64},
          "max_position_embeddings": None}, 64),
    ],
)  # fmt: skip
def test_how_far_a_model_reads(tmp_path: Path, settings: dict, positions: int | None):
    assert check_model_folder(write_model_folder(tmp_path, **settings)).max_positions == positions


def test_a_real_whole_folder_passes(base_folder: Path):
    """As transformers writes it, with all its settings."""
    found = check_model_folder(base_folder)
    assert (found.num_layers, found.hidden_size) == (2, 32)
    assert any(name.endswith("layers.1.self_attn.q_proj") for name in found.matrices)

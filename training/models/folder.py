"""Is a model folder complete and safe? Answered before any compute, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import ModelFolderError
from training.models.safetensors_header import Shapes, read_shapes, refuse_stand_in

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Older architectures have names of their own for the same numbers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@dataclass(frozen=True)
class ModelFolder:
    """What a Hugging Face folder says of itself; None where it does not say.

    max_positions: tokens of prompt and response together that it can read. matrices: names of the weights with two
    axes, `.weight` left off, e.g. `model.layers.0.self_attn.q_proj`.
    """

    path: Path
    architecture: str
    num_layers: int | None
    hidden_size: int | None
    max_positions: int | None
    has_chat_template: bool
    matrices: frozenset[str]


def check_model_folder(path: str | Path, role: str = "models.base") -> ModelFolder:
    """Check config, safetensors weights and tokenizer. Raises ModelFolderError naming what is missing or damaged."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(f"{role}: {folder}: no such folder", "give a local Hugging Face model folder")
    config = _read_config(folder, role)
    shapes = _check_weights(folder, role)
    _check_tokenizer(folder, role)
    return ModelFolder(
        path=folder,
        architecture=config["architectures"][0],
        num_layers=_number(config, _LAYERS),
        hidden_size=_number(config, _WIDTH),
        max_positions=_max_positions(config),
        has_chat_template=has_chat_template(folder),
        matrices=frozenset(name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2),
    )


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer has a chat template of its own: the mark of an instruct model."""
    if (folder / "chat_template.jinja").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(_read_object(settings, "models.base").get("chat_template"))


def _read_config(folder: Path, role: str) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ModelFolderError(f"{role}: {file}: missing", "a Hugging Face model folder has a config.json")
    content = _read_object(file, role)
    if "auto_map" in content:
        raise ModelFolderError(
            f"{role}: {file}: asks for code of its own (auto_map)", "use an architecture that transformers ships"
        )
    names = content.get("architectures")
    has_names = isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names)
    lacking = [] if has_names else ["architectures"]
    lacking += [] if _number(content, _WIDTH) or _inner(content) else ["hidden_size"]
    if lacking:
        raise ModelFolderError(
            f"{role}: {file}: no {' and no '.join(lacking)}",
            "copy the config.json of the model that the weights belong to",
        )
    return content


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own part of the config of a model that reads more than text."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The first of these entries that is a whole number above 0."""
    found = (part[name] for part in (config, _inner(config)) for name in names if name in part)
    return next((value for value in found if type(value) is int and value > 0), None)


def _max_positions(config: Mapping[str, Any]) -> int | None:
    """Positions that the model can read, stretched by its rope scaling where there is one."""
    limit = _number(config, _POSITIONS)
    for part in (config, _inner(config)):
        scaling = part.get("rope_scaling") or part.get("rope_parameters")
        if limit is None or not isinstance(scaling, dict):
            continue
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings", limit)
        if isinstance(factor, int | float) and isinstance(original, int | float) and factor > 1:
            limit = max(limit, int(factor * original))
    return limit


def _read_object(file: Path, role: str) -> dict[str, Any]:
    refuse_stand_in(file, role)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{role}: {file}: not valid JSON: {error}", "copy the file again") from None
    if not isinstance(content, dict):
        raise ModelFolderError(f"{role}: {file}: not a JSON object", "copy the file again")
    return content


def _check_tokenizer(folder: Path, role: str) -> None:
    found = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise ModelFolderError(
            f"{role}: {folder}: no tokenizer ({', '.join(_TOKENIZER_FILES)})",
            "save the tokenizer beside the weights: tokenizer.save_pretrained(folder)",
        )
    for file in found:
        refuse_stand_in(file, role)
    for name in _SETTINGS:
        if (folder / name).is_file():
            _read_object(folder / name, role)
    whole = folder / "tokenizer.json"
    if whole in found and not isinstance(_read_object(whole, role).get("model"), dict):
        raise ModelFolderError(
            f"{role}: {whole}: holds no tokenizer (no `model` in it)",
            "save the tokenizer again: tokenizer.save_pretrained(folder)",
        )


def _check_weights(folder: Path, role: str) -> Shapes:
    """Names and shapes of all weights. Every file is whole, and holds what the index says."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _check_shards(index, role)
    if (folder / "model.safetensors").is_file():
        return read_shapes(folder / "model.safetensors", role)
    pickles = [file.name for pattern in _PICKLES for file in folder.glob(pattern)]
    if pickles:
        raise ModelFolderError(
            f"{role}: {folder}: only pickle weights ({', '.join(sorted(pickles)[:3])}); Nightjar never unpickles",
            "convert once where you trust the source: model.save_pretrained(folder)  (writes safetensors)",
        )
    raise ModelFolderError(f"{role}: {folder}: no model.safetensors", "save the weights as safetensors")


def _check_shards(index: Path, role: str) -> Shapes:
    folder = index.parent
    weights = _read_object(index, role).get("weight_map")
    places = {name: str(place) for name, place in weights.items()} if isinstance(weights, dict) else {}
    if not places:
        raise ModelFolderError(f"{role}: {index}: names no weights", "copy the whole folder")
    shards = sorted(set(places.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ModelFolderError(f"{role}: {folder}: shards missing: {', '.join(missing)}", "copy the whole folder")
    found = {name: read_shapes(folder / name, role) for name in shards}
    absent = sorted(name for name, place in places.items() if name not in found[place])
    if absent:
        raise ModelFolderError(
            f"{role}: {folder / places[absent[0]]}: lacks {', '.join(absent[:3])}, which {index.name} says it holds",
            "copy the whole folder; index and shards are of different models",
        )
    return {name: shape for shapes in found.values() for name, shape in shapes.items()}

"""Is a model folder complete and safe? Answered before any compute, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import ModelFolderError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class ModelFolder:
    """What a Hugging Face folder says of itself."""

    path: Path
    architecture: str
    num_layers: int | None
    hidden_size: int | None
    has_chat_template: bool


def check_model_folder(path: str | Path, role: str = "models.base") -> ModelFolder:
    """Check config, safetensors weights and tokenizer. Raises ModelFolderError naming what is missing."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(f"{role}: {folder}: no such folder", "give a local Hugging Face model folder")
    config = _read_config(folder, role)
    _check_weights(folder, role)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelFolderError(
            f"{role}: {folder}: no tokenizer ({', '.join(_TOKENIZER_FILES)})",
            "save the tokenizer beside the weights: tokenizer.save_pretrained(folder)",
        )
    return ModelFolder(
        path=folder,
        architecture=(config.get("architectures") or ["unknown"])[0],
        num_layers=config.get("num_hidden_layers"),
        hidden_size=config.get("hidden_size"),
        has_chat_template=has_chat_template(folder),
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
    return content


def _read_object(file: Path, role: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{role}: {file}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelFolderError(f"{role}: {file}: not a JSON object")
    return content


def _check_weights(folder: Path, role: str) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weights = _read_object(index, role).get("weight_map")
        names = {str(name) for name in weights.values()} if isinstance(weights, dict) else set()
        if not names:
            raise ModelFolderError(f"{role}: {index}: names no weights", "copy the whole folder")
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise ModelFolderError(f"{role}: {folder}: shards missing: {', '.join(missing)}", "copy the whole folder")
        return
    if (folder / "model.safetensors").is_file():
        return
    pickles = [file.name for pattern in _PICKLES for file in folder.glob(pattern)]
    if pickles:
        raise ModelFolderError(
            f"{role}: {folder}: only pickle weights ({', '.join(sorted(pickles)[:3])}); Nightjar never unpickles",
            "convert once where you trust the source: model.save_pretrained(folder)  (writes safetensors)",
        )
    raise ModelFolderError(f"{role}: {folder}: no model.safetensors", "save the weights as safetensors")

"""Stand-ins for model files: as small as they can be, and whole. Written without torch, by the format's own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 8,
    "max_position_embeddings": 4096,
}  # fmt: skip
TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
WEIGHTS = {
    "model.embed_tokens.weight": (4, 8), "model.norm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8), "model.layers.0.mlp.up_proj.weight": (8, 8),
}  # fmt: skip


def write_safetensors(file: Path, shapes: dict[str, tuple[int, ...]] | None = None) -> Path:
    """A whole safetensors file of float32 zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in (shapes or {"weight": (1,)}).items():
        size = 4
        for axis in shape:
            size *= axis
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    said = json.dumps(header).encode()
    file.write_bytes(len(said).to_bytes(8, "little") + said + bytes(end))
    return file


def write_model_folder(folder: Path, **config: Any) -> Path:
    """A folder that passes every check before a night; `config` changes config.json, None takes an entry out."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in (CONFIG | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    write_safetensors(folder / "model.safetensors", WEIGHTS)
    return folder


def write_adapter(folder: Path) -> Path:
    """An adapter with its score head, as a distill stage leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 4}')
    for name in ("adapter_model.safetensors", "score_head.safetensors"):
        write_safetensors(folder / name)
    return folder

"""Two kinds of tiny model for the drill, written without torch: one that answers, and one that has fallen silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WIDTH, _INNER = 32, 64
_SPECIAL = ("<pad>", "<eos>", "<unk>")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .?+-"
_LEAN = 4.0
"""Every token read leans this far along the first dimension; the end of text is written where that leads, or never."""


def write_drill_model(folder: Path, seed: int, *, silent: bool = False) -> Path:
    """A Hugging Face folder of a Llama with one narrow layer: random letters, never an end; or, `silent`, the end of
    text at once. That makes its fault visible in a measurement while every check of its files passes."""
    folder.mkdir(parents=True)
    _write_tokenizer(folder)
    words = len(_SPECIAL) + len(_LETTERS)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": words, "hidden_size": _WIDTH,
        "intermediate_size": _INNER, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "float32",
    }  # fmt: skip
    _write(folder / "config.json", config)
    _write_weights(folder, seed, words, silent)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate((*_SPECIAL, *_LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | special)


def _write_weights(folder: Path, seed: int, words: int, silent: bool) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    layer = "model.layers.0"
    shapes = {f"{layer}.self_attn.{name}_proj.weight": (_WIDTH, _WIDTH) for name in "qkvo"}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": (_INNER, _WIDTH) for name in ("gate", "up")}
    shapes[f"{layer}.mlp.down_proj.weight"] = (_WIDTH, _INNER)
    weights = {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}
    read = rng.normal(0, 1.0, (words, _WIDTH)).astype(np.float32)
    read[:, 0] = _LEAN
    written = rng.normal(0, 1.0, (words, _WIDTH)).astype(np.float32)
    written[:, 0] = 0.0
    written[: len(_SPECIAL)] = 0.0
    written[: len(_SPECIAL), 0] = -2 * _LEAN
    if silent:
        written[_SPECIAL.index("<eos>"), 0] = 4 * _LEAN
    weights |= {"model.embed_tokens.weight": read, "lm_head.weight": written}
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    weights |= {f"{name}.weight": np.ones(_WIDTH, dtype=np.float32) for name in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")

"""A Hugging Face folder of a Llama with one narrow layer, written without torch: it loads, and answers nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

WIDTH, INNER = 32, 64


def write_tiny_model(folder: Path) -> Path:
    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789 .?+-"]
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | special)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(words), "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "float32",
    }  # fmt: skip
    _write(folder / "config.json", config)
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(words), WIDTH)}
    layer = "model.layers.0"
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
    shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, INNER)
    weights = {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    weights |= {f"{name}.weight": np.ones(WIDTH, dtype=np.float32) for name in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")

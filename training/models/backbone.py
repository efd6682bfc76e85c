"""One loaded network and the adapters on it. The only place that talks to transformers and peft."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from training.contract import read_json, write_json
from training.engines.spread import Read, Spread
from training.engines.weights import shape_of, whole_of
from training.errors import ModelFolderError
from training.models.folder import check_model_folder
from training.models.layout import Layout
from training.seeding import seeded_init

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class LoraSettings:
    """An adapter's shape. The update is scaled by alpha / rank."""

    rank: int
    alpha: float
    target_modules: str | list[str] = "all-linear"


class Backbone:
    """A causal language model, its tokenizer, and any number of named LoRA adapters on its frozen weights."""

    def __init__(self, model: Any, tokenizer: Any, source: Path, num_layers: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.num_layers = num_layers
        self._base = model
        self._peft: PeftModel | None = None
        self._spread: Spread | None = None
        self._is_read = False

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        num_layers: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> Backbone:
        """Load from a local folder, safetensors only, optionally the first `num_layers` decoder layers.

        Raises ModelFolderError when the folder is incomplete or a weight is missing from it.
        """
        checked = check_model_folder(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if num_layers is not None:
            _cut_layers(config, num_layers, checked.path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
        model, info = loaded
        _check_loading(info, checked.path, num_layers)
        model.to(device).eval()
        model.requires_grad_(False)
        if gradient_checkpointing:
            _recompute_layers(model)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return cls(model, tokenizer, checked.path, num_layers)

    @property
    def base(self) -> Any:
        """The transformers model itself."""
        return self._base

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        parameter: torch.Tensor = next(self._base.parameters())
        return parameter.device

    @property
    def hidden_size(self) -> int:
        """H, the width of the hidden states."""
        return int(self._base.config.get_text_config().hidden_size)

    def num_parameters(self) -> int:
        """Weights of the base model, adapters not counted."""
        names = {id(p): shape_of(p).numel() for name, p in self._base.named_parameters() if ".lora_" not in name}
        return sum(names.values())

    def add_adapter(self, name: str, settings: LoraSettings, seed: int) -> None:
        """Put a new LoRA adapter on the frozen weights; its update is zero until trained."""
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a float scales as well
            target_modules=settings.target_modules,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        self._inject(name, config, seed)

    def _inject(self, name: str, config: LoraConfig, seed: int) -> None:
        with seeded_init(seed, f"adapter/{name}"):
            if self._peft is None:
                self._peft = get_peft_model(self._base, config, adapter_name=name)
            else:
                self._peft.add_adapter(name, config)
        self._peft.to(self.device)

    def load_adapter(self, name: str, folder: Path, seed: int = 0) -> None:
        """Add an adapter and fill it from a PEFT folder, strictly: every weight there, of its shape, none left over.

        Rank, scale and targets are those of its own config, pattern by pattern; only its dropout is turned off.
        """
        for needed in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (folder / needed).is_file():
                raise ModelFolderError(f"{folder / needed}: missing", f"an adapter folder holds {needed}")
        config, file = LoraConfig.from_pretrained(str(folder)), folder / ADAPTER_WEIGHTS
        config.lora_dropout, config.inference_mode = 0.0, False
        self._inject(name, config, seed)
        weights = load_file(file)
        found = {key: tensor.shape for key, tensor in weights.items()}
        expected = {k: t.shape for k, t in get_peft_model_state_dict(self._peft, adapter_name=name).items()}
        if found != expected:
            odd = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))[:3]
            raise ModelFolderError(f"{file}: does not fit {self.source}: {', '.join(odd)}")
        set_peft_model_state_dict(self._peft, weights, adapter_name=name)

    def save_adapter(self, name: str, folder: Path, write: bool = True) -> None:
        """Write one adapter in PEFT's own layout (adapter_config.json, adapter_model.safetensors).

        Of spread weights every rank saves, and one of them with `write`; so it is with `merge_and_save` and `save`.
        """
        assert self._peft is not None
        weights = None
        if self._spread is not None:
            found = whole_of(self.adapter_parameters(name), keep=write)
            weights = {f"base_model.model.{key}": tensor for key, tensor in found.items()}
        if not write:
            return
        self._peft.save_pretrained(
            str(folder), selected_adapters=[name], safe_serialization=True, state_dict=weights
        )
        nested = folder / name
        if nested.is_dir():  # PEFT nests every adapter that is not called "default"
            for file in nested.iterdir():
                file.replace(folder / file.name)
            nested.rmdir()
        (folder / "README.md").unlink(missing_ok=True)
        config = read_json(folder / ADAPTER_CONFIG)
        if isinstance(config["target_modules"], list):  # a set in PEFT, whose order differs from process to process
            config["target_modules"].sort()
        write_json(folder / ADAPTER_CONFIG, config)

    def adapter_parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The adapter's weights by full name."""
        return {key: p for key, p in self._base.named_parameters() if f".{name}." in key and ".lora_" in key}

    def spread(self, how: Callable[[Any], Spread]) -> None:
        """Spread the weights over the ranks. Adapters come before, readers' engines after."""
        self._spread = how(self._base)

    def read(self, read: Callable[[], Read]) -> Read:
        """Run a forward pass of any kind. One inside another is part of it."""
        if self._spread is None or self._is_read:
            return read()
        self._is_read = True
        try:
            return self._spread.read(read)
        finally:
            self._is_read = False

    def whole(self) -> AbstractContextManager[None]:
        """For many passes without gradients, such as drawing answers token by token: no weight is gathered twice."""
        return nullcontext() if self._spread is None else self._spread.whole()

    @contextmanager
    def reading(self, adapter: str | None) -> Iterator[None]:
        """Read the network with this adapter, or with none."""
        if self._peft is None:
            yield
        elif adapter is None:
            with self._peft.disable_adapter():
                yield
        else:
            self._peft.set_adapter(adapter)
            yield

    def hidden(self, layout: Layout, adapter: str | None) -> torch.Tensor:
        """Hidden states at the response positions, [B, R + 1, H], after the final norm; masked slots hold anything."""
        attention = layout.attention
        if attention is not None:
            attention = attention.to(self._base.dtype)

        def read() -> torch.Tensor:
            states: torch.Tensor = self._base.base_model(
                input_ids=layout.input_ids,
                position_ids=layout.position_ids,
                attention_mask=attention,
                use_cache=False,
            ).last_hidden_state
            return states[layout.row[:, None], layout.positions]

        with self.reading(adapter):
            return self.read(read)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits of hidden states, [..., H] -> [..., V]."""
        logits: torch.Tensor = self.read(lambda: self._base.get_output_embeddings()(hidden))
        cap = getattr(self._base.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def merge_and_save(self, adapter: str, folder: Path, write: bool = True) -> None:
        """Fold the adapter into the weights and write a whole model folder. This backbone is spent afterwards."""
        assert self._peft is not None
        if self._spread is not None:
            self._merge_a_copy(adapter, folder, write)
            return
        if not write:
            return
        self._peft.set_adapter(adapter)
        merged = self._peft.merge_and_unload(adapter_names=[adapter])
        merged.save_pretrained(str(folder), safe_serialization=True)
        self.tokenizer.save_pretrained(str(folder))

    def _merge_a_copy(self, adapter: str, folder: Path, write: bool) -> None:
        """A fresh copy of the base takes the adapter: parts of weights cannot be merged one by one."""
        with TemporaryDirectory(dir=folder.parent) as place:
            self.save_adapter(adapter, Path(place), write)
            if not write:
                return
            cpu, kind = torch.device("cpu"), self._base.dtype
            copy = Backbone.load(self.source, device=cpu, dtype=kind, num_layers=self.num_layers)
            copy.load_adapter(adapter, Path(place))
        copy.merge_and_save(adapter, folder)

    def save(self, folder: Path, write: bool = True) -> None:
        """Write the base model and tokenizer as a whole model folder."""
        weights = None
        if self._spread is not None:
            kept = self._base.state_dict().keys()
            named = {**dict(self._base.named_parameters()), **dict(self._base.named_buffers())}
            weights = whole_of({name: tensor for name, tensor in named.items() if name in kept}, keep=write)
        if write:
            self._base.save_pretrained(str(folder), safe_serialization=True, state_dict=weights)
            self.tokenizer.save_pretrained(str(folder))


def _cut_layers(config: Any, num_layers: int, folder: Path) -> None:
    if num_layers > config.num_hidden_layers:
        raise ModelFolderError(f"{folder}: has {config.num_hidden_layers} layers, {num_layers} were asked for")
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def _check_loading(info: Any, folder: Path, num_layers: int | None) -> None:
    """A weight that is missing would be newly initialised with only a warning: refuse instead."""
    if info["missing_keys"]:
        raise ModelFolderError(f"{folder}: weights missing: {', '.join(sorted(info['missing_keys'])[:3])}")
    left_over = sorted(name for name in info["unexpected_keys"] if not _of_a_cut_layer(name, num_layers))
    if left_over:
        raise ModelFolderError(f"{folder}: weights left over: {', '.join(left_over[:3])}")


def _of_a_cut_layer(name: str, num_layers: int | None) -> bool:
    """Whether a weight's name holds the number of a layer that was not asked for, as in `model.layers.7.mlp`."""
    return num_layers is not None and any(int(number) >= num_layers for number in re.findall(r"\.(\d+)\.", name))


def _recompute_layers(model: Any) -> None:
    """Gradient checkpointing. The network stays in evaluation mode, but a layer recomputes only while it is `training`:
    so the layers themselves are, and nothing inside them (dropout) is. Without gradients they run as always."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    for module in model.modules():
        if module is not model and getattr(module, "gradient_checkpointing", False):
            module.training = True

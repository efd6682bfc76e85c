"""The code stored with every model version: what `mlflow.pyfunc.load_model("models:/NAME@champion")` runs.

MLflow keeps this file beside the weights (models from code: nothing is pickled) and executes it when loading. It needs
the installed Nightjar packages, for the one path from text to tokens and the one sampler: what is served is what was
measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import mlflow
from mlflow.pyfunc.model import PythonModel

_COLUMNS = ("prompt", "messages")
_BATCH_SIZE = 16

with warnings.catch_warnings():
    # MLflow would like type hints on `predict`; they would forbid the params and the two kinds of columns.
    warnings.filterwarnings("ignore", message=".*type hints.*")

    class NightjarPolicy(PythonModel):
        """Answers prompts: a list of strings, or a DataFrame with one column `prompt` (text) or `messages` (chat).

        Params: max_new_tokens, temperature (0 is greedy, the default), seed. Returns one string a row.
        """

        def load_context(self, context: Any) -> None:
            """Load weights (safetensors only, strictly) and tokenizer from the version's own `model` folder."""
            import torch

            from training.models.backbone import Backbone
            from training.models.network import Network

            on_gpu = torch.cuda.is_available()
            self._settings: Mapping[str, Any] = dict(context.model_config or {})
            self._network = Network(
                Backbone.load(
                    context.artifacts["model"],
                    device=torch.device("cuda" if on_gpu else "cpu"),
                    dtype=torch.bfloat16 if on_gpu and torch.cuda.is_bf16_supported() else torch.float32,
                )
            )
            self._network.backbone.base.get_output_embeddings().register_forward_hook(_refuse_nonfinite)

        def predict(self, context: Any, model_input: Any, params: Mapping[str, Any] | None = None) -> list[str]:
            """One answer a row, in order."""
            from training.models.sampling import SamplingSettings, sample_responses
            from training.models.tokenize import decode_response, encode_prompt
            from training.seeding import torch_generator

            given = dict(params or {})
            tokenizer = self._network.backbone.tokenizer
            max_length = self._settings.get("max_prompt_length")
            template = self._settings.get("chat_template", "auto")
            prompts = [encode_prompt(tokenizer, prompt, max_length, template) for prompt in prompts_of(model_input)]
            if not prompts:
                return []
            settings = SamplingSettings(
                max_new_tokens=int(given.get("max_new_tokens", 128)),
                temperature=float(given.get("temperature", 0.0)),
                batch_size=_BATCH_SIZE,
            )
            generator = torch_generator(int(given.get("seed", 0)), "serving")
            samples = sample_responses(self._network, prompts, settings, generator)
            return [decode_response(tokenizer, sample.token_ids) for sample in samples]


def prompts_of(model_input: Any) -> list[Any]:
    """Prompts (text or list of messages) of whatever pyfunc hands over. Raises ValueError naming the column."""
    if not hasattr(model_input, "columns"):
        return [model_input] if isinstance(model_input, str) else list(model_input)
    names = [str(name) for name in model_input.columns]
    if len(names) != 1 or names[0] not in (*_COLUMNS, "0"):
        raise ValueError(f"columns {', '.join(names)}: give one column, `prompt` (text) or `messages` (chat messages)")
    values = list(model_input[model_input.columns[0]])
    for row, value in enumerate(values):
        if not isinstance(value, str) and not _are_messages(value):
            raise ValueError(f"row {row}: give a text, or a list of messages with `role` and `content`")
    return values


def _are_messages(value: Any) -> bool:
    if not hasattr(value, "__len__") or isinstance(value, str | bytes | Mapping) or len(value) == 0:
        return False
    return all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in value)


def _refuse_nonfinite(module: Any, inputs: Any, logits: Any) -> None:
    """Broken weights answer with confident nonsense; they must fail a verification instead."""
    if not bool(logits.isfinite().all()):
        raise ValueError("the model's logits are not finite: its weights are broken")


mlflow.models.set_model(NightjarPolicy())

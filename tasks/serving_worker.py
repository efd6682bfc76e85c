"""The child in which versions are logged, loaded and asked: `python -m tasks.serving_worker`.

torch and the model live here, so the flow process stays small and survives whatever happens to them. Requests are
JSON lines on stdin, replies JSON lines on stdout; everything else that is printed goes to stderr. It ends with its
parent.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.process import die_with_parent

_REQUIRED = ("mlflow", "torch", "transformers", "tokenizers", "safetensors", "peft", "nightjar-rlhf")


def main() -> None:
    """Answer requests until stdin ends."""
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _load()
    operations: dict[str, Callable[..., dict[str, Any]]] = {"log": log_version, "answer": answer_prompts}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = operations[request.pop("op")](**request)
        except Exception as error:  # the parent must hear of anything that went wrong
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _load() -> None:
    """Import what every request needs: the seconds that takes pass while whoever started this is still busy."""
    for module in ("mlflow.pyfunc", "torch", "transformers", "peft"):
        importlib.import_module(module)


def answer_prompts(uri: str, tracking_uri: str, prompts: Sequence[str], max_new_tokens: int) -> dict[str, Any]:
    """Load `uri` afresh and answer greedily. `model_id` says which stored model it really was."""
    import mlflow

    mlflow.set_tracking_uri(tracking_uri)
    mlflow.set_registry_uri(tracking_uri)
    model = mlflow.pyfunc.load_model(uri)
    answers = model.predict(list(prompts), params={"max_new_tokens": max_new_tokens})
    return {"answers": [str(answer) for answer in answers], "model_id": model.metadata.model_id}


def log_version(
    name: str,
    tracking_uri: str,
    experiment_id: str,
    run_tags: Mapping[str, str],
    version_tags: Mapping[str, str],
    artifacts: Mapping[str, str],
    settings: Mapping[str, Any],
    max_new_tokens: int,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Log the files in a short run of their own (log_model re-reads a run's whole metric history) and register them."""
    import mlflow
    from mlflow import MlflowClient

    mlflow.set_tracking_uri(tracking_uri)
    mlflow.set_registry_uri(tracking_uri)
    client = MlflowClient()
    if run_id is None:
        run_id = client.create_run(experiment_id, run_name="register", tags=dict(run_tags)).info.run_id
    with mlflow.start_run(run_id=run_id):
        info = mlflow.pyfunc.log_model(
            name="policy",
            python_model=str(Path(__file__).with_name("serving_model.py")),
            artifacts=dict(artifacts),
            model_config=dict(settings),
            signature=signature(max_new_tokens),
            input_example=(["What is two plus three?"], {"max_new_tokens": 8}),
            pip_requirements=requirements(),
        )
        version = client.create_model_version(
            name, f"models:/{info.model_id}", run_id=run_id, tags=dict(version_tags), model_id=info.model_id
        )
    return {"version": str(version.version), "model_id": info.model_id, "run_id": run_id}


def signature(max_new_tokens: int) -> Any:
    """One column of any type (text or messages) to one of text, with the sampling params and their defaults."""
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType, ColSpec, DataType, ParamSchema, ParamSpec, Schema

    params = [
        ParamSpec("max_new_tokens", DataType.long, max_new_tokens),
        ParamSpec("temperature", DataType.double, 0.0),
        ParamSpec("seed", DataType.long, 0),
    ]
    anything: Any = AnyType
    return ModelSignature(Schema([ColSpec(anything())]), Schema([ColSpec(DataType.string)]), ParamSchema(params))


def requirements() -> list[str]:
    """The installed versions of what serving imports, without local build labels such as +cpu."""
    found = []
    for package in _REQUIRED:
        try:
            found.append(f"{package}=={importlib.metadata.version(package).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()

"""Where MLflow is, and a client for it. The only place that sets MLflow's own environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from configs.credentials import without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

DATABASE = "mlflow.db"
ARTIFACTS = "mlartifacts"
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    # A pyproject.toml with uv.lock in the working directory would be copied into every model version.
    "MLFLOW_UV_AUTO_DETECT": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
# MLflow's own seven retries with doubling pauses make a dead server look like a hanging night.
_BOUNDED = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1"}


def tracking_uri_of(home: Path, configured: str | None) -> str:
    """The store to use: the config's, else MLFLOW_TRACKING_URI, else SQLite in the home."""
    chosen = configured or os.environ.get("MLFLOW_TRACKING_URI")
    return chosen or f"sqlite:///{home.resolve() / DATABASE}"


def is_embedded(home: Path, uri: str) -> bool:
    """Whether `uri` is the home's own database."""
    return uri == f"sqlite:///{home.resolve() / DATABASE}"


def mlflow_environment() -> dict[str, str]:
    """Variables a child process needs to speak to MLflow as we do; what the user has set stays."""
    defaults = _QUIET | _BOUNDED
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def connect(uri: str) -> MlflowClient:
    """A client for tracking and registry at `uri`. SQLite gets its folder."""
    for name, value in mlflow_environment().items():
        os.environ.setdefault(name, value)
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    import logging

    from mlflow import MlflowClient

    # Alembic and MLflow tell of every table they make, in the middle of the night's progress.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def shown_cause(uri: str, error: Exception) -> Exception | None:
    """The cause to chain an error to; none where its text may hold the URI's password, since tracebacks are logged."""
    return None if without_credentials(uri) != uri else error

"""Where MLflow is, and a client for it. The only place that sets MLflow's own environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from configs.credentials import user_and_password, without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRACKING_URI = "MLFLOW_TRACKING_URI"
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
# A server that takes connections and answers none would hold a call for MLflow's two minutes, times the retries.
# Uploads wait that long with good reason: the server answers when the last byte is stored.
_BRIEF = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def tracking_uri_of(home: Path, configured: str | None) -> str:
    """The store to use: the config's, else MLFLOW_TRACKING_URI, else SQLite in the home.

    A log-in in the variable's address moves to the variables that MLflow has for it: MLflow quotes addresses in errors
    and hands them to every library that it calls.
    """
    if variable := os.environ.get(TRACKING_URI):
        os.environ[TRACKING_URI], login = user_and_password(variable)
        if login is not None:
            os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"] = login
    return configured or os.environ.get(TRACKING_URI) or f"sqlite:///{home.resolve() / DATABASE}"


def is_embedded(home: Path, uri: str) -> bool:
    """Whether `uri` is the home's own database."""
    return uri == f"sqlite:///{home.resolve() / DATABASE}"


def missing_database(uri: str) -> Path | None:
    """The file of a SQLite store that is not there or empty, so that asking would make its tables; else None."""
    name = uri.removeprefix("sqlite:///").partition("?")[0]
    if name == uri or name in ("", ":memory:") or name.startswith("file:"):
        return None
    try:
        return None if Path(name).stat().st_size else Path(name)
    except (OSError, ValueError):
        return Path(name)


SERVER_ENVIRONMENT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""For every `mlflow server` of ours: its background jobs (scorers, gateways) are seven processes that nothing uses."""


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


class _Brief:
    """Who is inside `briefly` now, and what the variables were before the first of them."""

    lock = threading.Lock()
    inside = 0
    before: dict[str, str | None] = {}  # noqa: RUF012  (the process has one environment, so there is one of these)


@contextmanager
def briefly() -> Iterator[None]:
    """Inside, MLflow's calls give up after seconds: for what is only shown. What the user has set stays.

    MLflow reads its patience from the environment at every call, so this holds for all threads.
    """
    with _Brief.lock:
        if _Brief.inside == 0:
            ours = {name: os.environ.get(name) for name in _BRIEF}
            _Brief.before = {name: value for name, value in ours.items() if value in (None, _BOUNDED.get(name))}
            os.environ.update({name: _BRIEF[name] for name in _Brief.before})
        _Brief.inside += 1
    try:
        yield
    finally:
        with _Brief.lock:
            _Brief.inside -= 1
            if _Brief.inside == 0:
                _restore(_Brief.before)


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def shown_cause(uri: str, error: Exception) -> Exception | None:
    """The cause to chain an error to; none where its text may hold the URI's password, since tracebacks are logged."""
    return None if without_credentials(uri) != uri else error

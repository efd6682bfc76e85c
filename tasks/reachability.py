"""Is MLflow there, before anything is computed? Answered within a bounded time, with the way out in words."""

from __future__ import annotations

import threading
from urllib.parse import urlsplit

from configs.credentials import without_credentials
from tasks.mlflow_client import connect, shown_cause
from tasks.registry_errors import TrackingUnavailable


def require_tracking(uri: str, timeout_seconds: float = 15.0) -> None:
    """Return when the store at `uri` answers a real query. Raises TrackingUnavailable saying what to do.

    A real query, because MLflow answers /health also to hosts that it refuses everything else. It runs in a thread of
    its own: neither a database driver nor MLflow's retries can be relied on to give up in time.
    """
    failure: list[Exception] = []
    thread = threading.Thread(target=_ask, args=(uri, failure), name="nightjar-reachability", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    shown = without_credentials(uri)
    if thread.is_alive():
        raise TrackingUnavailable(f"MLflow at {shown} did not answer within {timeout_seconds:g} s", _start_it(uri))
    if failure:
        raise TrackingUnavailable(*_explained(uri, failure[0])) from shown_cause(uri, failure[0])


def _ask(uri: str, failure: list[Exception]) -> None:
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception as error:  # whatever it is, the caller must hear it in words
        failure.append(error)


def _explained(uri: str, error: Exception) -> tuple[str, str]:
    """Message and way out for what a server or database said."""
    text, shown = str(error), without_credentials(uri)
    if "Host header" in text:
        host = urlsplit(uri).netloc.rpartition("@")[2]
        return (
            f"MLflow at {shown} answers 403: it does not allow the host name {host}",
            f"start it with `mlflow server --allowed-hosts {host}` (host:port; a bare name is not enough)",
        )
    if "error code 401" in text or "error code 403" in text:
        return (
            f"MLflow at {shown} refuses these credentials",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    if "error code 404" in text:
        return f"{shown} answers, but is no MLflow server (404)", "correct registry.tracking_uri / MLFLOW_TRACKING_URI"
    if isinstance(error, ModuleNotFoundError):
        return f"the database driver for {shown} is not installed ({error.name})", f"pip install {error.name}"
    first = text.splitlines()[0] if text else type(error).__name__
    return f"MLflow at {shown} does not answer: {without_credentials(first)[:300]}", _start_it(uri)


def _start_it(uri: str) -> str:
    if urlsplit(uri).scheme in ("http", "https"):
        return "start the server, or correct registry.tracking_uri / MLFLOW_TRACKING_URI; nothing has been computed"
    return "make the database reachable and writable, or correct registry.tracking_uri; nothing has been computed"

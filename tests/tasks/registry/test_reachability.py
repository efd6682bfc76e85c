"""Is MLflow there? Answered in bounded time, with the way out."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from configs.credentials import without_credentials
from tasks.mlflow_client import tracking_uri_of
from tasks.reachability import require_tracking
from tasks.registry import ModelRegistry
from tasks.registry_errors import TrackingUnavailable

ServerProcess = Popen[bytes]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_database_answers(home: Path) -> None:
    require_tracking(tracking_uri_of(home, None), 60)


def test_nobody_at_the_port() -> None:
    with pytest.raises(TrackingUnavailable, match=r"does not answer(.|\n)*start the server"):
        require_tracking(f"http://127.0.0.1:{free_port()}", 60)


def test_a_port_that_never_answers_is_given_up_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(TrackingUnavailable, match=r"within 0\.5 s"):
            require_tracking(f"http://user:secret@127.0.0.1:{silent.getsockname()[1]}", 0.5)


def test_a_database_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is no database, it only looks like a file" * 100)
    with pytest.raises(TrackingUnavailable, match=r"mlflow\.db"):
        require_tracking(f"sqlite:///{tmp_path / 'mlflow.db'}", 60)


def test_credentials_are_never_shown() -> None:
    assert without_credentials("postgresql://ada:secret@db:5432/x?y=1") == "postgresql://***@db:5432/x?y=1"
    assert without_credentials("http://127.0.0.1:5000") == "http://127.0.0.1:5000"


def test_a_password_in_the_environments_uri_is_in_no_message_nor_traceback() -> None:
    uri = f"http://ada:hunter2@127.0.0.1:{free_port()}/"
    for ask in (lambda: require_tracking(uri, 60), lambda: ModelRegistry("m", uri).alias("champion")):
        with pytest.raises(TrackingUnavailable) as refused:
            ask()
        told = "".join(traceback.format_exception(refused.value))
        assert "127.0.0.1" in told
        assert "hunter2" not in told


def test_where_mlflow_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri_of(tmp_path, None) == f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://a:1")
    assert tracking_uri_of(tmp_path, None) == "http://a:1"
    assert tracking_uri_of(tmp_path, "http://b:2") == "http://b:2"


@pytest.mark.slow
def test_a_host_not_allowed_is_said_in_words(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    port = free_port()
    start_server(tmp_path, port, f"localhost:{port}")
    with pytest.raises(TrackingUnavailable, match=rf"403(.|\n)*--allowed-hosts 127\.0\.0\.1:{port}"):
        require_tracking(f"http://127.0.0.1:{port}", 60)
    require_tracking(f"http://localhost:{port}", 60)

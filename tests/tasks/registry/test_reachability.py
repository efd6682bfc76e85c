"""Is MLflow there? Answered in bounded time, with the way out."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.mlflow_client import mlflow_environment, tracking_uri_of, without_credentials
from tasks.reachability import require_tracking
from tasks.registry_errors import TrackingUnavailable


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


def test_where_mlflow_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri_of(tmp_path, None) == f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://a:1")
    assert tracking_uri_of(tmp_path, None) == "http://a:1"
    assert tracking_uri_of(tmp_path, "http://b:2") == "http://b:2"


@pytest.fixture(scope="module")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A real server that allows another host name than the one it is asked under."""
    port, folder = free_port(), tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--allowed-hosts", f"localhost:{port}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "log.txt").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **mlflow_environment()}, process_group=0
        )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        yield port
    finally:

        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.slow
def test_a_host_that_is_not_allowed_is_said_in_words(strict_server: int) -> None:
    with pytest.raises(TrackingUnavailable, match=rf"403(.|\n)*--allowed-hosts 127\.0\.0\.1:{strict_server}"):
        require_tracking(f"http://127.0.0.1:{strict_server}", 60)
    require_tracking(f"http://localhost:{strict_server}", 60)

"""MLflow's and Prefect's servers on copies of a home's two databases, so that nothing in the home changes."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

START_SECONDS = 180.0
QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}


def mlflow_of(home: Path, folder: Path) -> AbstractContextManager[str]:
    """MLflow on a copy of the home's database in `folder`, with the home's artifacts; its address."""
    database = copy_database(home / "mlflow.db", folder / "mlflow.db")
    command = ["mlflow", "server", "--backend-store-uri", f"sqlite:///{database}", "--workers", "1"]
    command += ["--default-artifact-root", (home / "mlartifacts").as_uri()]
    return serving(command, free_port(), "/health", folder)


def prefect_of(home: Path, folder: Path) -> AbstractContextManager[str]:
    """Prefect on a copy of the home's database in `folder`, without its services; its address."""
    copy_database(home / "prefect" / "prefect.db", folder / "prefect" / "prefect.db")
    port = free_port()
    settings = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_UI_STATIC_DIRECTORY": str(folder / "pages"),
    }
    return serving(["prefect", "server", "start", "--no-services"], port, "/api/health", folder, **settings)


def copy_database(source: Path, target: Path) -> Path:
    """A consistent copy, with what still lies in the write-ahead log. Raises when there is no such file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as old,
        closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
    return target


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(arguments: list[str], port: int, health: str, folder: Path, **environment: str) -> Iterator[str]:
    """A server as a child on loopback; yields its address, ends it and its workers at the end."""
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with (folder / f"{arguments[0]}.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=os.environ | QUIET | environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until_up(server, address + health, Path(log.name))
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"{url} does not answer:\n{log.read_text(errors='replace')[-2000:]}")

"""Real servers that a test stops and starts again: on the same port, with the same data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tasks.launch_plan import ROOT, free_port
from tasks.mlflow_client import SERVER_ENVIRONMENT, mlflow_environment

START_SECONDS = 600.0


class Server:
    """One server process group below `folder`; `url` answers at `health` once it is up."""

    def __init__(
        self, folder: Path, arguments: Sequence[str], port: int, health: str, environment: Mapping[str, str]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, port
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", *arguments]
        self._health = f"{self.url}{health}"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = self.folder / "log.txt"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=output, env=self._environment, cwd=self.folder, process_group=0
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):
                urllib.request.urlopen(self._health, timeout=2)
                return
            assert self._process.poll() is None, log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)
        raise AssertionError(log.read_text(errors="replace")[-2000:])

    def kill(self) -> None:
        """End it without a word, as a machine does that loses its power."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def mlflow_server(folder: Path) -> Server:
    """`mlflow server` on SQLite with its artifact proxy."""
    port = free_port()
    arguments = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    arguments += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/store"]
    arguments += ["--allowed-hosts", f"127.0.0.1:{port}"]
    return Server(folder, arguments, port, "/health", plain_environment() | mlflow_environment() | SERVER_ENVIRONMENT)


def prefect_server(folder: Path) -> Server:
    """`prefect server` on SQLite."""
    port = free_port()
    arguments = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    return Server(folder, arguments, port, "/api/health", prefect_environment(folder, None))


def prefect_environment(folder: Path, url: str | None) -> dict[str, str]:
    """For a process that talks to that server, and to no other that this process knows."""
    quiet = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    return plain_environment() | quiet | ({"PREFECT_API_URL": f"{url}/api"} if url else {})


def plain_environment() -> dict[str, str]:
    """This process's environment without its own servers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}

"""`nightjar ui`: MLflow's own server on this home, on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
from rich.console import Console

from configs.credentials import without_credentials
from configs.errors import NightjarError
from tasks.last_config import sites_of
from tasks.mlflow_client import ARTIFACTS, SERVER_ENVIRONMENT, is_embedded, missing_database, mlflow_environment

LOG = "ui.log"
_START_SECONDS = 180.0
_GRACE_SECONDS = 10.0


def ui_command(home: Path, uri: str, port: int) -> list[str]:
    """The server's command line: this home's database and artifacts, loopback, its own two names, one worker."""
    hosts = f"127.0.0.1:{port},localhost:{port}"
    return [
        sys.executable, "-m", "mlflow", "server",
        "--backend-store-uri", uri,
        "--default-artifact-root", (home / ARTIFACTS).as_uri(),
        "--host", "127.0.0.1", "--port", str(port), "--allowed-hosts", hosts, "--workers", "1",
    ]  # fmt: skip


def serve_ui(home: Path, port: int) -> int:
    """Serve until Ctrl-C; servers of the user's own are only named. Raises NightjarError when it cannot start."""
    uris = sorted({site.tracking_uri for site in sites_of(home)})
    console = Console()
    for uri in uris:
        if not is_embedded(home, uri):
            console.print(f"MLflow is at {without_credentials(uri)}; open it there", highlight=False)
        elif (file := missing_database(uri)) is not None:
            raise NightjarError(f"{file} is missing or empty: there is nothing to show", "restore it from a backup")
    embedded = [uri for uri in uris if is_embedded(home, uri)]
    return _serve(home, embedded[0], port, console) if embedded else 0


def _serve(home: Path, uri: str, port: int, console: Console) -> int:
    _require_free(port)
    log = home / LOG
    console.print("starting MLflow ...", highlight=False)
    with log.open("wb") as output:
        server = subprocess.Popen(
            ui_command(home, uri, port),
            env=os.environ | mlflow_environment() | SERVER_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        _wait_until_up(server, port, log)
        console.print(f"MLflow on http://127.0.0.1:{port}  (Ctrl-C ends it; its log is {log})", highlight=False)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _end(server)


def _require_free(port: int) -> None:
    """Otherwise another server would answer, and its pages would be taken for this home's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise NightjarError(f"port {port} is taken by another program", f"try --port {port + 1}") from None


def _wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise NightjarError(
                f"MLflow's server ended: {last[0] if last else f'exit code {server.returncode}'}",
                f"the whole output is in {log}",
            )
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise NightjarError(f"MLflow's server did not answer on port {port} in {_START_SECONDS:g} s", f"see {log}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and its workers."""
    try:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in family:
            if process.is_running():
                process.send_signal(number)
        _, family = psutil.wait_procs(family, timeout=_GRACE_SECONDS)

"""`nightjar ui`: MLflow's own server on this home, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from tasks.last_config import site_of
from tasks.mlflow_client import ARTIFACTS, is_embedded, mlflow_environment, without_credentials


def ui_command(home: Path, uri: str, port: int) -> list[str]:
    """The server's command line: this home's database and artifacts, loopback, one worker."""
    return [
        sys.executable, "-m", "mlflow", "server",
        "--backend-store-uri", uri,
        "--default-artifact-root", (home / ARTIFACTS).as_uri(),
        "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
    ]  # fmt: skip


def serve_ui(home: Path, port: int) -> int:
    """Serve until Ctrl-C. With a server of the user's own, say where it is."""
    site = site_of(home)
    console = Console()
    if not is_embedded(home, site.tracking_uri):
        console.print(f"MLflow is at {without_credentials(site.tracking_uri)}; open it there", highlight=False)
        return 0
    console.print(f"MLflow on http://127.0.0.1:{port}  (Ctrl-C ends it)", highlight=False)
    try:
        environment = os.environ | mlflow_environment()
        return subprocess.run(ui_command(home, site.tracking_uri, port), env=environment, check=False).returncode
    except KeyboardInterrupt:
        return 0

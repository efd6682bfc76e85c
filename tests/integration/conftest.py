"""The native stack, started once: PostgreSQL, `prefect server`, `mlflow server` and two process workers on loopback."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.errors import NightjarError
from flows.stack_postgres import find_binaries
from tests.integration.stack_at_hand import ROOT, Stack, marked, quiet_ports

QUIET = {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def require_postgres() -> None:
    """Without it there is nothing to run: said on a developer's machine, an error where CI counts on it."""
    try:
        find_binaries()
    except NightjarError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI runs the native stack, and {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    require_postgres()
    home = Path(tempfile.mkdtemp(prefix="nightjar-integration-"))
    home.chmod(0o711)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    ports = zip(("prefect", "mlflow", "postgres"), map(str, quiet_ports(3)), strict=True)
    made = Stack(home, kept | QUIET | {"NIGHTJAR_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    try:
        with made.timed("stack up"):
            made.shell("flows.stack", "up", *(part for name, port in ports for part in (f"--{name}-port", port)))
        lines = (home / "stack/env").read_text(encoding="utf-8").splitlines()
        made.environment |= dict(shlex.split(line)[1].split("=", 1) for line in lines)
        yield made
    finally:
        with made.timed("stack down"):
            made.shell("flows.stack", "down")
        left = [" ".join(process.cmdline()) for process in marked(home)]
        print({name: round(seconds) for name, seconds in made.seconds.items()})  # noqa: T201
        shutil.rmtree(home, ignore_errors=True)
        assert left == []


@pytest.fixture
def at_its_servers(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process asks the stack's MLflow, as the worker's processes do."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", stack.environment["MLFLOW_TRACKING_URI"])

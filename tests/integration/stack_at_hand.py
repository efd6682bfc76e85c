"""The running stack, and what a person at a shell or in the browser would do with it."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tasks.process_tree import MARK

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests/integration/short.yaml"
MODEL = "short-policy"
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass
class Stack:
    """A stack below `home`; `environment` knows its addresses. `seconds`: what took how long."""

    home: Path
    environment: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)

    def shell(self, *command: str, seconds: float = 1500) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command], env=self.environment, capture_output=True, text=True, cwd=ROOT,
            timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def prefect(self, path: str, content: dict[str, Any] | None = None) -> Any:
        """The API's reply. A server whose database is away is asked again, as the browser does."""

        def asked() -> httpx.Response | None:
            reply = httpx.post(f"{self.environment['PREFECT_API_URL']}/{path}", json=content or {}, timeout=120)
            return reply if reply.status_code < httpx.codes.INTERNAL_SERVER_ERROR else None

        reply = until(asked)
        reply.raise_for_status()
        return reply.json()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note the seconds of the block."""
        started = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - started

    def runs(self, flow: str) -> list[dict[str, Any]]:
        """Newest first, as the flow runs page lists them."""
        wanted = {"flows": {"name": {"any_": [flow]}}, "sort": "START_TIME_DESC", "limit": 100}
        return self.prefect("flow_runs/filter", wanted)

    def start(self, deployment: str, **parameters: Any) -> str:
        """`prefect deployment run`, as the README says it; returns the run's id."""
        before = {run["id"] for run in self.runs(deployment.split("/")[0])}
        given = [part for name, value in parameters.items() for part in ("--param", f"{name}={json.dumps(value)}")]
        self.shell("prefect", "deployment", "run", deployment, *given)
        (new,) = [run["id"] for run in self.runs(deployment.split("/")[0]) if run["id"] not in before]
        return new

    def wait(self, run_id: str, seconds: float = 1800) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            (run,) = self.prefect("flow_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}})
            return run if run["state_type"] in FINAL else None

        return until(ended, seconds)

    def alias(self, alias: str) -> str | None:
        """Asked of the MLflow server directly."""
        reply = httpx.get(
            f"{self.environment['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/registered-models/alias",
            params={"name": MODEL, "alias": alias},
            timeout=120,
        )
        content = reply.json()
        assert "model_version" in content or "not found" in content["message"], content
        return content["model_version"]["version"] if "model_version" in content else None

    def service(self, name: str) -> list[psutil.Process]:
        """The processes of a service."""
        return marked(self.home / "stack/services" / name)


def until(found: Callable[[], Any], seconds: float = 900) -> Any:
    """Wait for it, bounded."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"it did not come to that in {seconds} s"
        time.sleep(0.5)
    return value


def marked(place: Path) -> list[psutil.Process]:
    """Every process that was started for this place or below it, stage or service."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK, "")
        except (psutil.Error, OSError):
            continue
        if f"{mark}/".startswith(f"{place}/") and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def quiet_ports(count: int) -> list[int]:
    """Free ports below those that the system gives to outgoing connections: none is taken meanwhile by chance."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            if len(found) < count and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found

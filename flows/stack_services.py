"""The services of the native stack: how each is started, what it is told, and when it counts as healthy."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flows.stack_postgres import Postgres
from tasks.home import VARIABLE
from tasks.launch_plan import ROOT
from tasks.mlflow_client import SERVER_ENVIRONMENT

LOOPBACK = "127.0.0.1"
DATABASES = ("prefect", "mlflow")
_HUNG_SECONDS = 600.0
_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
}

# A machine whose cores all train answers slowly, and Prefect's server gives up on its database after seconds.
_PATIENT = {
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
}

# The server answers 500 while its database is being restarted: runs then ask again, for about a minute.
_PERSISTENT = {"PREFECT_CLIENT_RETRY_EXTRA_CODES": "500"}


@dataclass(frozen=True)
class Ports:
    """Ports on loopback."""

    prefect: int = 4200
    mlflow: int = 5000
    postgres: int = 54329

    def named(self) -> dict[str, int]:
        """By service."""
        return asdict(self)


@dataclass(frozen=True)
class Service:
    """A long-running process. `healthy` asks it; `ready` runs once each time it has become healthy. Times in seconds.

    `stop` is the signal of a clean end; `user` is whom it runs as, null for this user. `spares_children`: what it had
    started goes on when it dies and is started again (a night need not die with its worker). `hung_after`: a living
    process that has not answered for this long is started again; null: only a dead one is, since what asks, or the
    machine, may be the slow one. `beside`: it needs not the one before it, only what that one needs, and is started
    together with it.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    healthy: Callable[[], bool]
    ready: Callable[[], None] = lambda: None
    stop: signal.Signals = signal.SIGTERM
    grace: float = 30.0
    user: str | None = None
    spares_children: bool = False
    hung_after: float | None = None
    beside: bool = False
    secrets: tuple[str, ...] = field(default=(), repr=False)


def addresses(ports: Ports) -> dict[str, str]:
    """What a shell must know to use the stack."""
    return {
        "PREFECT_API_URL": f"http://{LOOPBACK}:{ports.prefect}/api",
        "MLFLOW_TRACKING_URI": f"http://{LOOPBACK}:{ports.mlflow}",
    }


def services_of(home: Path, folder: Path, ports: Ports, postgres: Postgres) -> list[Service]:
    """In the order in which they are started."""
    return [
        _postgres(postgres),
        _prefect(folder, ports, postgres),
        _mlflow(folder, ports, postgres),
        _worker("cpu", home, folder, ports),
        replace(_worker("gpu", home, folder, ports), beside=True),
    ]


def _postgres(cluster: Postgres) -> Service:
    return Service(
        name="postgres",
        command=cluster.command,
        environment={},
        healthy=cluster.answers,
        ready=lambda: cluster.ensure_databases(DATABASES),
        stop=signal.SIGINT,  # its "fast" end: open sessions are closed, the log is written
        user=cluster.user,
    )


def _prefect(folder: Path, ports: Ports, cluster: Postgres) -> Service:
    url = cluster.url("asyncpg", "prefect")
    return Service(
        name="prefect",
        command=[sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(ports.prefect)],
        environment=_base(folder) | addresses(ports) | _PATIENT | {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url},
        healthy=lambda: _answers(f"http://{LOOPBACK}:{ports.prefect}/api/health"),
        hung_after=_HUNG_SECONDS,
        secrets=(cluster.password,),
    )


def _mlflow(folder: Path, ports: Ports, cluster: Postgres) -> Service:
    hosts = ",".join(f"{host}:{ports.mlflow}" for host in (LOOPBACK, "localhost"))
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(ports.mlflow), "--workers", "1",
        "--serve-artifacts", "--artifacts-destination", (folder / "mlflow-artifacts").as_uri(),
        "--allowed-hosts", hosts,
    ]  # fmt: skip
    # The database's address holds a password, and command lines can be read by everyone.
    told = SERVER_ENVIRONMENT | {"MLFLOW_BACKEND_STORE_URI": cluster.url("psycopg2", "mlflow")}
    return Service(
        name="mlflow",
        command=command,
        environment=_base(folder) | told,
        healthy=lambda: _answers(f"http://{LOOPBACK}:{ports.mlflow}/health"),
        hung_after=_HUNG_SECONDS,
        beside=True,
        secrets=(cluster.password,),
    )


def _worker(pool: str, home: Path, folder: Path, ports: Ports) -> Service:
    name = f"native-{pool}"
    command = [
        sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", name,
    ]  # fmt: skip
    told = {VARIABLE: str(home), "PYTHONPATH": str(ROOT), "PREFECT_WORKER_QUERY_SECONDS": "2"}
    return Service(
        name=f"worker-{pool}",
        command=command,
        environment=_base(folder) | addresses(ports) | _PERSISTENT | told,
        healthy=lambda: _online(ports, pool, name),
        grace=45.0,  # it ends its flow runs first, which may take them 30 s
        spares_children=True,
    )


def _base(folder: Path) -> dict[str, str]:
    """This shell's environment without settings of other servers, and with Prefect's files kept in the stack."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return kept | _QUIET | {"PREFECT_HOME": str(folder / "prefect"), "PYTHONUNBUFFERED": "1"}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def _online(ports: Ports, pool: str, name: str) -> bool:
    """Whether the Prefect server has heard of the worker lately."""
    url = f"http://{LOOPBACK}:{ports.prefect}/api/work_pools/{pool}/workers/filter"
    request = urllib.request.Request(url, data=b"{}", headers={"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            workers = json.load(reply)
    except (OSError, ValueError):
        return False
    return any(worker["name"] == name and worker["status"] == "ONLINE" for worker in workers)

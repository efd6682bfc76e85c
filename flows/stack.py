"""The native stack: PostgreSQL, Prefect and MLflow on it, two workers; loopback only, supervised, stopped cleanly.

`python -m flows.stack up | status | down`, or `make stack` and `make stack-down`. For one machine and for tests: real
installations are described in docs/operations.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from configs.errors import NightjarError
from flows.stack_postgres import open_postgres
from flows.stack_reconcile import ask_for_reconcile
from flows.stack_services import LOOPBACK, Ports, addresses, services_of
from flows.stack_supervisor import LOGS, STATE, Supervisor
from tasks.home import home_at, home_of
from tasks.launch_plan import ROOT
from tasks.locks import held_lock, holder_of
from tasks.night_lock import night_at_work
from tasks.process_tree import end_processes

FOLDER = "stack"
_UP_SECONDS = 1200.0
_DOWN_SECONDS = 240.0
_SERVICES = ("worker-gpu", "worker-cpu", "mlflow", "prefect", "postgres")

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
Home = Annotated[Path | None, typer.Option("--home", help="Default: NIGHTJAR_HOME, or .nightjar here.")]
PrefectPort = Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect server.")]
MlflowPort = Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow server.")]
PostgresPort = Annotated[int, typer.Option(min=1, max=65535, help="Port of PostgreSQL.")]


@app.command()
def up(
    home: Home = None,
    prefect_port: PrefectPort = Ports.prefect,
    mlflow_port: MlflowPort = Ports.mlflow,
    postgres_port: PostgresPort = Ports.postgres,
) -> None:
    """Start everything and wait until it is healthy. Running already: say so."""
    place = _home(home)
    ports = Ports(prefect_port, mlflow_port, postgres_port)
    folder = place / FOLDER
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    if supervisor_of(folder) is not None:
        typer.echo("the stack is running already")
    else:
        if holder_of(folder / "lock") is None:
            _end_strays(folder)
        require_free(ports)
        require_driver()
        started, since = time.monotonic(), datetime.now(UTC)
        _spawn(place, folder, ports)
        typer.echo(f"the stack is up after {time.monotonic() - started:.0f} s")
        if chains := ask_for_reconcile(addresses(ports)["PREFECT_API_URL"], since):
            typer.echo(f"asked to close what the last stack left open, which takes a minute: {', '.join(chains)}")
    shown = (folder / "env").read_text(encoding="utf-8")
    read = f". {shlex.quote(str(folder / 'env'))}"
    typer.echo(f"{_states(folder)}\n\nfor your shell (also: {read}):\n{shown}")


@app.command()
def down(home: Home = None) -> None:
    """End everything, and check that nothing is left. The data stay."""
    folder = _home(home) / FOLDER
    supervisor, ended = supervisor_of(folder), night_at_work(folder.parent)
    if supervisor is not None:
        supervisor.send_signal(signal.SIGTERM)
        try:
            supervisor.wait(_DOWN_SECONDS)
        except psutil.TimeoutExpired:
            supervisor.kill()
    strays = _end_strays(folder)
    (folder / "supervisor.pid").unlink(missing_ok=True)
    left = f"; {strays} stray process(es) of a killed supervisor were ended" if strays else ""
    typer.echo(("the stack is down" if supervisor is not None else "the stack was not running") + left)
    if ended is not None and night_at_work(folder.parent) is None:
        typer.echo(f"{ended} was at work and has ended with it; its next start goes on from there")


@app.command()
def status(home: Home = None) -> None:
    """Say what runs. Exit code 0: everything is healthy, 1: something is not, 3: the stack is down."""
    folder = _home(home) / FOLDER
    if supervisor_of(folder) is None:
        typer.echo("the stack is not running")
        raise typer.Exit(3)
    typer.echo(_states(folder))
    raise typer.Exit(0 if _all_healthy(read_state(folder)) else 1)


@app.command(hidden=True)
def supervise(home: Path, prefect_port: int, mlflow_port: int, postgres_port: int) -> None:
    """What `up` starts in the background."""
    folder = home / FOLDER
    ports = Ports(prefect_port, mlflow_port, postgres_port)
    with held_lock(folder / "lock", "the stack"):
        (folder / "supervisor.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
        try:
            Supervisor(folder, services_of(home, folder, ports, open_postgres(folder, ports.postgres))).run()
        finally:
            (folder / "supervisor.pid").unlink(missing_ok=True)


def supervisor_of(folder: Path) -> psutil.Process | None:
    """The living supervisor of this folder. A reused pid is told apart by the lock that only the supervisor holds."""
    if holder_of(folder / "lock") is None:
        return None
    try:
        return psutil.Process(int((folder / "supervisor.pid").read_text(encoding="utf-8")))
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None


def read_state(folder: Path) -> dict[str, Any]:
    """The supervisor's last word; empty when there is none."""
    try:
        return dict(json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def require_free(ports: Ports) -> None:
    """Raises NightjarError naming the first port that somebody else holds."""
    for name, port in ports.named().items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise NightjarError(
                    f"port {port} is taken, so {name} cannot listen on it ({error.strerror})",
                    f"end what listens there, or choose another: python -m flows.stack up --{name}-port PORT",
                ) from None


def require_driver() -> None:
    """Raises NightjarError without MLflow's driver for PostgreSQL (Prefect brings its own)."""
    if importlib.util.find_spec("psycopg2") is None:
        raise NightjarError("MLflow needs psycopg2 to keep its data in PostgreSQL", "pip install psycopg2-binary")


def _end_strays(folder: Path) -> int:
    """End what a killed supervisor has left, which would hold the very ports; how many processes there were."""
    return sum(end_processes(folder / "services" / name) for name in _SERVICES)


def shell_lines(home: Path, ports: Ports) -> str:
    """What a shell reads to use this stack; quoted, since a home may have blanks in its path."""
    variables = addresses(ports) | {"NIGHTJAR_HOME": str(home)}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _spawn(home: Path, folder: Path, ports: Ports) -> None:
    (folder / STATE).unlink(missing_ok=True)
    (folder / "env").write_text(shell_lines(home, ports), encoding="utf-8")
    command = [sys.executable, "-m", "flows.stack", "supervise", str(home), *map(str, ports.named().values())]
    log = folder / LOGS / "supervisor.log"
    with log.open("ab") as output:
        # PostgreSQL refuses a working directory that its user cannot enter, hence not this one.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            cwd="/", env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    deadline = time.monotonic() + _UP_SECONDS
    while not _all_healthy(read_state(folder)):
        if process.poll() is not None:
            raise NightjarError(f"the stack did not come up: {_last_line(log)}", f"the logs are in {folder / LOGS}")
        if time.monotonic() > deadline:
            process.terminate()
            raise NightjarError(f"the stack was not healthy in {_UP_SECONDS:.0f} s", f"the logs are in {folder / LOGS}")
        time.sleep(0.3)


def _all_healthy(state: dict[str, Any]) -> bool:
    services = state.get("services", {})
    return state.get("stack") == "running" and bool(services) and all(one["healthy"] for one in services.values())


def _states(folder: Path) -> str:
    lines = []
    for name, one in read_state(folder).get("services", {}).items():
        how = "healthy" if one["healthy"] else "NOT HEALTHY"
        lines.append(f"{name:<12} {how:<12} pid {one['pid']}, {one['restarts']} restart(s)")
    return "\n".join(lines)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it said nothing"


def _home(home: Path | None) -> Path:
    return home_at(home) if home is not None else home_of()


def main() -> None:
    """Entry point; what can be mended is said in words."""
    try:
        app()
    except NightjarError as error:
        typer.echo(f"error {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

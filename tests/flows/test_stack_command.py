"""`python -m flows.stack` before anything is started: what it refuses, and what it says when nothing runs."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.errors import NightjarError
from flows import stack
from flows.stack import app, read_state, require_driver, require_free, shell_lines, supervisor_of
from flows.stack_postgres import Postgres
from flows.stack_services import Ports, addresses, services_of
from tasks.launch_plan import free_port
from tasks.locks import held_lock
from tasks.process_tree import MARK


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> None:
    """None is needed here."""


def ports() -> Ports:
    return Ports(free_port(), free_port(), free_port())


def test_a_taken_port_is_named_with_the_way_out() -> None:
    require_free(ports())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(NightjarError, match=rf"port {taken} is taken.*mlflow") as refused:
            require_free(Ports(free_port(), taken, free_port()))
    assert "--mlflow-port" in str(refused.value)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NightjarError, match="psycopg2-binary"):
        require_driver()


def test_a_shell_reads_the_home_as_it_is_written(tmp_path: Path) -> None:
    home = tmp_path / "my home; $(touch struck) 'x'"
    (tmp_path / "env").write_text(shell_lines(home, ports()), encoding="utf-8")
    script = '. ./env && printf "%s" "$NIGHTJAR_HOME"'
    told = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout == str(home)
    assert not (tmp_path / "struck").exists()


def test_nothing_runs_and_ending_it_is_fine(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["status", "--home", str(tmp_path)])
    assert (told.exit_code, told.output.strip()) == (3, "the stack is not running")
    told = CliRunner().invoke(app, ["down", "--home", str(tmp_path)])
    assert (told.exit_code, told.output.strip()) == (0, "the stack was not running")
    assert read_state(tmp_path / "stack") == {}


LISTENS = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
time.sleep(60)
"""


def test_what_a_killed_supervisor_left_does_not_stand_in_the_way(tmp_path: Path, monkeypatch) -> None:
    port = free_port()
    other = ["--mlflow-port", str(free_port()), "--postgres-port", str(free_port())]
    marked = os.environ | {MARK: str(tmp_path / "stack/services/prefect")}
    command = [sys.executable, "-c", LISTENS, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=marked) as stray:
        assert stray.stdout is not None
        stray.stdout.readline()
        monkeypatch.setattr(stack, "_spawn", lambda home, folder, given: (folder / "env").write_text("made\n"))
        told = CliRunner().invoke(app, ["up", "--home", str(tmp_path), *other, "--prefect-port", str(port)])
        stray.kill()
    assert told.exit_code == 0, told.exception
    assert "the stack is up" in told.output


def test_a_reused_pid_is_not_taken_for_the_supervisor(tmp_path: Path) -> None:
    folder = tmp_path / "stack"
    folder.mkdir()
    (folder / "supervisor.pid").write_text(f"{os.getpid()}\n")
    assert supervisor_of(folder) is None, "nobody holds the lock"
    with held_lock(folder / "lock", "the stack"):
        found = supervisor_of(folder)
        assert found is not None
        assert found.pid == os.getpid()


def test_secrets_are_in_environments_alone_and_only_where_they_are_needed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "of-another-server")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://another")
    at = ports()
    cluster = Postgres(Path("/usr/lib/postgresql/15/bin"), tmp_path / "data", at.postgres, "pa55word", None)
    services = {one.name: one for one in services_of(tmp_path, tmp_path / "stack", at, cluster)}
    assert list(services) == ["postgres", "prefect", "mlflow", "worker-cpu", "worker-gpu"]
    for name, service in services.items():
        assert "pa55word" not in " ".join(service.command), name
        assert ("pa55word" in str(dict(service.environment))) is (name in ("prefect", "mlflow")), name
        assert "of-another-server" not in str(dict(service.environment)), name
        assert "pa55word" not in repr(service.secrets) or name in ("prefect", "mlflow")
    for name in ("worker-cpu", "worker-gpu"):
        told = services[name].environment
        assert addresses(at).items() <= told.items()
        assert told["NIGHTJAR_HOME"] == str(tmp_path)
        assert (services[name].spares_children, services[name].hung_after) == (True, None)
    assert f"127.0.0.1:{at.mlflow},localhost:{at.mlflow}" in services["mlflow"].command

"""Temporary servers of killed nights. The server is a stand-in with its command line; the processes are real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tasks.process_identity import ProcessIdentity
from tasks.stray_servers import OWNER, end_strays, sign

SERVER = [sys.executable, "-c", "import time; time.sleep(600)", "prefect.server.api.server:create_app"]


def gone_owner() -> str:
    """The name of a process that has ended."""
    over = subprocess.Popen([sys.executable, "-c", ""])
    name = name_of(ProcessIdentity.of(over.pid))
    over.wait()
    return name


def name_of(process: ProcessIdentity) -> str:
    return f"{process.boot_id}:{process.pid}:{process.started}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    started = []

    def starting(owner: str, command: list[str] = SERVER, home: str = str(tmp_path)) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, env={**os.environ, OWNER: owner, "PREFECT_HOME": home}))
        while psutil.Process(started[-1].pid).cmdline()[-1:] != command[-1:]:  # still this process, before its exec
            time.sleep(0.01)
        return started[-1]

    yield starting
    for process in started:
        process.kill()
        process.wait()


def test_a_server_whose_night_is_gone_is_ended(start, tmp_path: Path) -> None:
    server = start(gone_owner())
    assert end_strays(str(tmp_path)) == 1
    server.wait(10)
    assert end_strays(str(tmp_path)) == 0


def test_a_pid_that_was_given_out_again_is_no_owner(start, tmp_path: Path) -> None:
    start(name_of(replace(ProcessIdentity.current(), started=1.0)))
    assert end_strays(str(tmp_path)) == 1


def test_the_server_of_a_living_night_stays(start, tmp_path: Path) -> None:
    mine: dict[str, str] = {}
    sign(mine)
    server = start(mine[OWNER])
    assert end_strays(str(tmp_path)) == 0
    assert server.poll() is None


def test_the_server_of_a_living_night_stays_when_the_clock_is_set(start, tmp_path: Path, monkeypatch) -> None:
    mine: dict[str, str] = {}
    sign(mine)
    server = start(mine[OWNER])
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: before(self) + 3600.0)
    assert end_strays(str(tmp_path)) == 0
    assert server.poll() is None


@pytest.mark.parametrize("name", [f"{os.getpid()}:1.00", "nonsense", ""], ids=["this pid", "nonsense", "nothing"])
def test_a_name_of_another_version_is_of_nobody(start, tmp_path: Path, name: str) -> None:
    start(name)
    assert end_strays(str(tmp_path)) == (1 if name else 0)


def test_servers_of_other_homes_and_other_programs_stay(start, tmp_path: Path) -> None:
    elsewhere = start(gone_owner(), home=str(tmp_path / "other"))
    program = start(gone_owner(), command=[sys.executable, "-c", "import time; time.sleep(600)", "a worker"])
    assert end_strays(str(tmp_path)) == 0
    assert elsewhere.poll() is None
    assert program.poll() is None

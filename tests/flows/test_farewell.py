"""A command ends although the server that it was to tell everything has gone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prefect.settings import PREFECT_API_URL

from flows.farewell import leave
from tasks.launch_plan import ROOT, free_port
from tests.faults.servers import plain_environment

TELLS = """
import sys
from prefect.events import emit_event
from flows.farewell import leave
for number in range(int(sys.argv[1])):
    emit_event("nightjar.test.farewell", resource={"prefect.resource.id": f"nightjar.test.{number}"})
leave(SystemExit(3), float(sys.argv[2]))
"""
MANY, BOUND = 100, 300
"""Prefect would try for eight seconds an event, so that an unbounded farewell outlasts the bound."""


def ends(url: str, events: int, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TELLS, str(events), str(seconds)], env=plain_environment() | {"PREFECT_API_URL": url},
        cwd=ROOT, capture_output=True, text=True, timeout=BOUND, check=False,
    )  # fmt: skip


def test_events_that_nobody_takes_do_not_keep_the_command() -> None:
    ended = ends(f"http://127.0.0.1:{free_port()}/api", MANY, 1.0)
    assert ended.returncode == 3, ended.stderr
    assert "everything on disk stands" in ended.stderr


def test_events_that_are_taken_are_waited_for() -> None:
    ended = ends(str(PREFECT_API_URL.value()), 3, float(BOUND))
    assert ended.returncode == 3, ended.stderr
    assert "everything on disk stands" not in ended.stderr


@pytest.mark.parametrize("code", [0, 2, None])
def test_a_command_that_told_no_server_anything_ends_as_it_wants(monkeypatch, code: int | None) -> None:
    monkeypatch.delitem(sys.modules, "prefect.events.worker", raising=False)
    with pytest.raises(SystemExit) as ending:
        leave(SystemExit(code))
    assert ending.value.code == code

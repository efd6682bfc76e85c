"""Nights that a server schedules and a process worker runs: five that were missed, one cancelled at its work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tasks.last_config import site_of
from tasks.night_state import NightBook
from tasks.registry import CHAMPION
from tests.faults.meanwhile import until
from tests.faults.night_process import FAKES
from tests.faults.servers import Server, prefect_environment, prefect_server
from tests.faults.soundness import assert_next_night_works, assert_sound, processes_below
from tests.flows.nights import FAKES as SMALL_STAGES
from tests.flows.nights import Nights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
ENDS_SECONDS = 900.0
BUSY_ANSWERS = 60


@dataclass
class Operated:
    """A home whose nights a server knows as nightly/fault, and the worker of its pool."""

    nights: Nights
    server: Server
    environment: dict[str, str]

    def ask(self, path: str, content: dict[str, Any] | None = None, method: str = "POST") -> Any:
        for _ in range(BUSY_ANSWERS):
            reply = httpx.request(method, f"{self.server.url}/api/{path}", json=content or {}, timeout=60)
            if reply.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # SQLite is being written: asked for again
                break
            time.sleep(1.0)
        reply.raise_for_status()
        return reply.json() if reply.content else None

    @property
    def deployment(self) -> str:
        (found,) = self.ask("deployments/filter", {"flows": {"name": {"any_": ["nightly"]}}})
        return str(found["id"])

    def due(self, hours_ago: float) -> str:
        """A night that was due then."""
        when = (datetime.now(UTC) - timedelta(hours=hours_ago)).isoformat()
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": when}}
        return str(self.ask(f"deployments/{self.deployment}/create_flow_run", {"state": state})["id"])

    def end_of(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def is_over() -> bool:
            found.update(self.ask(f"flow_runs/{run}", method="GET"))
            return found["state_type"] in FINAL

        until(is_over, ENDS_SECONDS)
        return found

    def start_worker(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "cpu", "--type", "process"]
        log = (self.server.folder / "worker.txt").open("ab")
        return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)


@pytest.fixture
def operated(new_home: Callable[..., Nights], tmp_path: Path) -> Iterator[Operated]:
    """`nightjar deploy` for a home, with the small stages put in the place of the real ones."""
    nights, server = new_home(), prefect_server(tmp_path / "prefect-server")
    server.start()
    environment = prefect_environment(server.folder, server.url) | {
        "NIGHTJAR_HOME": str(nights.home), "PREFECT_WORKER_QUERY_SECONDS": "1", "NIGHTJAR_FAKE": "",
    }  # fmt: skip
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(SMALL_STAGES), str(FAKES)])
    made = Operated(nights, server, environment)
    command = [sys.executable, "-m", "flows.cli", "deploy", str(nights.config_path), "--no-gpu-pool"]
    subprocess.run([*command, "--cron", "off", "--watch-cron", "off"], env=environment, check=True, timeout=900)
    made.ask(f"deployments/{made.deployment}", {"entrypoint": "small_flow.nightly"}, method="PATCH")
    try:
        yield made
    finally:
        server.kill()


@pytest.fixture
def worker(operated: Operated) -> Iterator[Callable[[], None]]:
    """Start the worker when called; ended with the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield lambda: started.append(operated.start_worker())
    for process in started:
        family = psutil.Process(process.pid).children(recursive=True)
        for member in (*family, process):  # its farewell would outlast the test
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


@pytest.mark.parametrize("hours_ago", [(97, 73, 49, 25, 1), (109, 85, 61, 37, 13), (13,)])
def test_of_missed_nights_one_catches_up(
    operated: Operated, worker: Callable[[], None], hours_ago: tuple[float, ...]
) -> None:
    missed = [operated.due(hours) for hours in hours_ago]
    worker()
    ends = [operated.end_of(run) for run in missed]
    told = [(end["state_name"], end["state"]["message"]) for end in ends]
    # The worker submits all at once: one of them, stale or not, gets the only slot, and the server cancels the others.
    caught_up = [end for end in ends if end["state_name"] == "Completed"]
    assert len(caught_up) == 1, told
    assert "version 1 is champion" in caught_up[0]["state"]["message"], told
    assert {end["state_name"] for end in ends} <= {"Completed", "Cancelled", "Skipped"}, told
    assert len(NightBook(operated.nights.home).nights()) == 1
    assert_sound(operated.nights.home)
    assert assert_next_night_works(operated.nights) == "2"


def test_cancelled_at_its_work_nothing_is_left(operated: Operated, worker: Callable[[], None]) -> None:
    home = operated.nights.home
    assert operated.nights.run().is_completed()
    operated.environment["NIGHTJAR_FAKE"] = "ppo=hang_with_child"
    worker()
    run = operated.due(0)
    until((home / "runs/fault-0002/ppo/stray.pid").exists, ENDS_SECONDS)
    assert processes_below(home) != []
    cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    operated.ask(f"flow_runs/{run}/set_state", cancelling)
    assert operated.end_of(run)["state_type"] == "CANCELLED"
    until(lambda: processes_below(home) == [])
    assert site_of(home).registry.alias(CHAMPION) == "1"

    state = operated.nights.run()
    assert state.is_completed(), state.message
    assert any("goes on where it stopped" in note for note in operated.nights.heard.notes)
    assert operated.nights.starts("validate") == 2, "nothing was computed twice"
    assert_sound(home)
    assert assert_next_night_works(operated.nights) == "3"

"""The supervisor on small services in real processes: order, health, restarts, a clean end, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from configs.errors import NightjarError
from flows.stack_services import Service
from flows.stack_supervisor import Supervisor
from tasks.process_tree import processes_of

SERVE = """
import os, pathlib, signal, subprocess, sys, time
place = pathlib.Path(sys.argv[1])
with place.with_suffix(".starts").open("a") as starts:
    starts.write(f"{os.getpid()}\\n")
if sys.argv[2] == "ends":
    sys.exit("the port is taken, says " + os.environ.get("SECRET", ""))
if sys.argv[2] == "has_child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
place.touch()
time.sleep(600)
"""


class Stack:
    """Services in a folder, and their supervisor in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order: list[str] = []
        self.error: BaseException | None = None

    def service(self, name: str, how: str = "serves", **more: object) -> Service:
        place = self.folder / name
        environment = {"PATH": os.environ["PATH"]} | dict(more.pop("environment", {}))  # type: ignore[call-overload]
        settings: dict = {"healthy": place.exists, "ready": lambda: self.order.append(name), "grace": 5.0} | more
        return Service(name, [sys.executable, "-c", SERVE, str(place), how], environment, **settings)

    def start(self, *services: Service) -> Supervisor:
        self.supervisor = Supervisor(self.folder, services, look_every=0.2)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self.supervisor

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.supervisor.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()

    def state(self) -> dict:
        try:
            return json.loads((self.folder / "state.json").read_text())
        except (OSError, ValueError):
            return {"stack": None, "services": {}}

    def starts(self, name: str) -> list[int]:
        file = self.folder / f"{name}.starts"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def processes(self, name: str) -> list[psutil.Process]:
        return processes_of(self.folder / "services" / name)


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> None:
    """None is needed here."""


def until(condition: Callable[[], object], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # threads may not set handlers
    made = Stack(tmp_path)
    yield made
    made.end()


def is_running(stack: Stack) -> bool:
    return stack.state()["stack"] == "running"


def test_in_order_each_after_the_one_before_is_healthy_and_all_ended(stack: Stack) -> None:
    stack.start(stack.service("first"), stack.service("second", "has_child"))
    until(lambda: is_running(stack))
    assert stack.order == ["first", "second"]
    state = stack.state()["services"]
    assert {name: (one["healthy"], one["restarts"]) for name, one in state.items()} == {
        "first": (True, 0), "second": (True, 0),
    }  # fmt: skip
    assert int((stack.folder / "first.pid").read_text()) == state["first"]["pid"] == stack.starts("first")[0]
    assert len(stack.processes("second")) == 2
    stack.end()
    assert stack.state()["stack"] == "stopped"
    assert stack.processes("first") + stack.processes("second") == [], "not even a child in a session of its own"
    assert not list(stack.folder.glob("*.pid"))
    assert stack.error is None


def test_one_beside_another_does_not_wait_for_it_and_the_next_waits_for_both(stack: Stack) -> None:
    slow_place = stack.folder / "looked at"
    slow = stack.service("slow", healthy=slow_place.exists)
    stack.start(slow, stack.service("beside", beside=True), stack.service("next"))
    until(lambda: stack.starts("beside"))
    assert (stack.order, stack.starts("next")) == ([], [])
    slow_place.touch()
    until(lambda: is_running(stack))
    assert stack.order == ["slow", "beside", "next"]


def test_one_that_dies_is_started_again_and_made_ready_again(stack: Stack) -> None:
    stack.start(stack.service("server"))
    until(lambda: is_running(stack))
    (stack.folder / "server").unlink()
    os.kill(stack.starts("server")[0], signal.SIGKILL)
    until(lambda: len(stack.starts("server")) == 2)
    until(lambda: stack.state()["services"]["server"] | {"pid": 0} == {"pid": 0, "healthy": True, "restarts": 1})
    assert stack.order == ["server", "server"]


def test_one_that_hangs_is_started_again_when_its_patience_is_used_up(stack: Stack) -> None:
    stack.start(stack.service("hangs", hung_after=0.6), stack.service("slow"))
    until(lambda: is_running(stack))
    (stack.folder / "hangs").unlink()
    (stack.folder / "slow").unlink()
    until(lambda: len(stack.starts("hangs")) == 2)
    assert len(stack.starts("slow")) == 1, "without a limit only its death counts"
    until(lambda: stack.state()["services"]["slow"]["healthy"] is False)


def test_children_of_a_worker_that_dies_go_on_until_the_end(stack: Stack) -> None:
    stack.start(stack.service("worker", "has_child", spares_children=True), stack.service("server", "has_child"))
    until(lambda: is_running(stack))
    for name in ("worker", "server"):
        os.kill(stack.starts(name)[0], signal.SIGKILL)
    until(lambda: len(stack.starts("worker")) == 2 and len(stack.starts("server")) == 2)
    until(lambda: len(stack.processes("worker")) == 3)  # the new one, its child, and the child of the dead one
    until(lambda: len(stack.processes("server")) == 2)
    stack.end()
    assert stack.processes("worker") + stack.processes("server") == []


def test_one_that_does_not_come_up_ends_the_stack_in_words_without_its_secrets(stack: Stack) -> None:
    broken = stack.service("broken", "ends", environment={"SECRET": "pa55word"}, secrets=("pa55word",))
    stack.start(stack.service("first"), broken, stack.service("never"))
    until(lambda: not stack.thread.is_alive())
    assert isinstance(stack.error, NightjarError)
    assert "broken ended at once: the port is taken, says ***" in str(stack.error)
    assert stack.starts("never") == []
    assert stack.processes("first") == []
    assert stack.state()["stack"] == "stopped"


def test_a_stubborn_one_is_killed(stack: Stack) -> None:
    stack.start(stack.service("stubborn", "stubborn", grace=0.3))
    until(lambda: is_running(stack))
    stack.end()
    assert stack.processes("stubborn") == []


def test_a_health_check_that_breaks_is_a_no(stack: Stack) -> None:
    answers = iter([subprocess.TimeoutExpired("pg_isready", 10), OSError("no such file"), NightjarError("refused")])

    def healthy() -> bool:
        for error in answers:
            raise error
        return True

    stack.start(stack.service("server", healthy=healthy))
    until(lambda: is_running(stack))
    assert (stack.order, stack.error) == (["server"], None)


def test_strays_of_a_killed_supervisor_are_ended_first(stack: Stack) -> None:
    first = Stack(stack.folder)
    first.start(first.service("server", "has_child"))
    until(lambda: is_running(first))
    strays = {process.pid for process in first.processes("server")}
    second = stack.start(stack.service("server"))
    until(lambda: len(stack.starts("server")) >= 2 and not strays & {p.pid for p in stack.processes("server")})
    first.end()
    second.stop()

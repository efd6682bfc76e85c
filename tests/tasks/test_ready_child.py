"""Children that wait for their turn: real `python -m training` processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks import ready_child
from tasks.launch import run_stage
from tasks.launch_plan import LaunchPlan
from tasks.process_tree import processes_of
from tasks.progress import Silent
from tasks.ready_child import ReadyChildren
from training.contract import LOG, StageSpec, write_spec
from training.errors import StageError

PLAN = LaunchPlan(threads=1, retries=0, timeout=120.0, lease=30.0, retry_pause=0.01)
# The base stage is torch-free until it is asked for something: it loads in a second or two.
STAGE = "base"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_child, "available_cores", lambda: 2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "home/runs/n1/base"


def wrong_spec(directory: Path) -> StageSpec:
    """A spec that the child reads and refuses in words: enough to see who ran it."""
    home = str(directory.parents[2])
    return StageSpec(STAGE, "n1", home, 0, config={}, params={}, code_version="x")


def test_the_waiting_child_makes_the_first_attempt(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = ReadyChildren()
    assert ready.prepare(STAGE, directory, PLAN)
    (waiting,) = processes_of(directory)
    started: list[object] = []
    monkeypatch.setattr("tasks.launch.start_child", lambda *a, **k: started.append(a))
    with pytest.raises(StageError, match=r"^stage base: spec of stage base: config has no section"):
        run_stage(wrong_spec(directory), directory, PLAN, Silent(), ready)
    assert started == [], "the one that waited was not used"
    assert not waiting.is_running() or not processes_of(directory)
    log = (directory / LOG).read_text()
    assert "ERROR nightjar: ContractError: spec of stage base: config has no section" in log
    assert "Traceback" not in log


def test_a_stage_that_is_not_needed_leaves_no_process(directory: Path) -> None:
    ready = ReadyChildren()
    ready.prepare(STAGE, directory, PLAN)
    ready.end()
    assert processes_of(directory) == []
    assert not ready.holds(directory)


def test_another_plan_is_not_taken(directory: Path) -> None:
    ready = ReadyChildren()
    ready.prepare(STAGE, directory, PLAN)
    assert ready.take(directory, LaunchPlan(threads=1, device="cuda")) is None
    assert processes_of(directory) == []


def test_one_that_died_while_waiting_is_replaced(directory: Path) -> None:
    ready = ReadyChildren()
    ready.prepare(STAGE, directory, PLAN)
    (waiting,) = processes_of(directory)
    waiting.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 180
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ready.take(directory, PLAN) is None


def test_the_death_of_the_parent_ends_it(directory: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tasks import ready_child; "
        "from tasks.launch_plan import LaunchPlan; ready_child.available_cores = lambda: 2; "
        "ready = ready_child.ReadyChildren(); "
        f"ready.prepare({STAGE!r}, Path({str(directory)!r}), LaunchPlan(threads=1)); "
        "print('up', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    assert len(processes_of(directory)) == 1
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 180
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(directory) == []


@pytest.mark.parametrize(
    "plan", [LaunchPlan(threads=2), LaunchPlan(threads=1, nproc_per_node=2), LaunchPlan(threads=0)]
)
def test_where_it_would_not_pay_nothing_is_started(
    directory: Path, plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.launch_plan.available_cores", lambda: 2)
    assert not ReadyChildren().prepare(STAGE, directory, plan)
    assert not directory.exists()


def test_a_directory_with_a_spec_is_left_alone(directory: Path) -> None:
    write_spec(directory, wrong_spec(directory))
    assert not ReadyChildren().prepare(STAGE, directory, PLAN)


def test_validate_is_left_alone(directory: Path) -> None:
    assert not ReadyChildren().prepare("validate", directory, PLAN)

"""Processes killed in the middle of a promotion, and two at once: the champion always loads, and the next one works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.promotion import promote
from tasks.reconcile import reconcile
from tasks.registry import CHAMPION, PREVIOUS, Version
from tasks.serving import ServingWorker
from tasks.site import Site

Register = Callable[..., Version]
CHILD = Path(__file__).with_name("promoting_child.py")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def start(site: Site, shared_worker: ServingWorker) -> Callable[..., subprocess.Popen[str]]:
    """Start a promoting child with the session's serving child."""
    process = shared_worker._process
    assert process is not None
    assert process.stdin is not None
    assert process.stdout is not None
    pipes = (process.stdin.fileno(), process.stdout.fileno())

    def run(candidate: str, judged_against: str, moment: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(CHILD), str(site.home), candidate, judged_against, moment, *map(str, pipes)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, pass_fds=pipes, env=environment, stderr=subprocess.PIPE, text=True)

    return run


def answers_through_the_alias(site: Site) -> str:
    """The stored model that the champion alias loads and generates with."""
    with site.worker() as worker:
        return worker.answer(f"models:/{site.model}@{CHAMPION}", ["Hello, who are you?"], 4).model_id


@pytest.mark.parametrize(
    ("moment", "alias_moved"),
    [("before_move", False), ("after_move", True), ("before_verified", True), ("inside_verified", True)],
)
def test_killed_promotion_is_reverted_at_the_next_start(
    site: Site, register: Register, start: Callable[..., subprocess.Popen[str]], moment: str, alias_moved: bool
) -> None:
    first, second = register(1), register(2)
    promote(site, first.number, judged_against=None)
    child = start(second.number, first.number, moment)
    assert child.wait() == -signal.SIGKILL
    assert [entry.event for entry in site.journal.unfinished()] == ["pending"]
    assert site.registry.alias(CHAMPION) == (second.number if alias_moved else first.number)

    done = reconcile(site)

    assert len(done.settled) == 1
    assert site.registry.alias(CHAMPION) == first.number
    assert answers_through_the_alias(site) == first.model_id
    assert site.journal.unfinished() == []
    assert [entry.event for entry in site.journal.entries()][-1] == "reverted"
    assert site.journal.torn_lines() == int(moment == "inside_verified")
    assert done.problems == [], "the next entry has sealed the torn line"
    assert reconcile(site).settled == []

    promote(site, second.number, judged_against=first.number)
    assert answers_through_the_alias(site) == second.model_id
    assert site.registry.alias(PREVIOUS) == first.number


def test_killed_first_promotion_leaves_no_champion(
    site: Site, register: Register, start: Callable[..., subprocess.Popen[str]]
) -> None:
    only = register(1)
    assert start(only.number, "none", "after_move").wait() == -signal.SIGKILL
    reconcile(site)
    assert site.registry.alias(CHAMPION) is None
    promote(site, only.number, judged_against=None)
    assert site.registry.alias(CHAMPION) == only.number


def test_two_promotions_at_once_end_with_one_champion(
    site: Site, register: Register, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first, second, third = register(1), register(2), register(3)
    promote(site, first.number, judged_against=None)
    children = {number: start(number, first.number, "never") for number in (second.number, third.number)}
    said = {number: child.communicate()[1] for number, child in children.items()}
    won = [number for number, child in children.items() if child.returncode == 0]
    (lost,) = set(children) - set(won)
    assert len(won) == 1
    assert "PromotionRaced" in said[lost]
    assert site.registry.alias(CHAMPION) == won[0]
    assert site.registry.alias(PREVIOUS) == first.number
    assert site.journal.champions(site.model) == (first.number, won[0])


@pytest.mark.slow
def test_serving_child_dies_with_its_parent(tmp_path: Path) -> None:
    import psutil

    script = (
        "import sys, time; from pathlib import Path; from tasks.serving import ServingWorker\n"
        "with ServingWorker('sqlite://', Path(sys.argv[1]), 60.0) as worker:\n"
        "    time.sleep(3); print(worker._process.pid, flush=True); time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

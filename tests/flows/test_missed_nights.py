"""Which of several missed starts catches up: asked of a real server's flow runs, and of a home's nights."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from prefect import get_client
from prefect.states import Cancelled, Completed, Scheduled

from flows import missed_nights
from flows.deploy import deploy
from flows.deployments import Chain
from flows.missed_nights import is_too_old, late_since
from tasks.night_state import NightBook

LIMIT_HOURS = 48.0
LOST_THE_SLOT = "Deployment concurrency limit reached."


def hours_ago(hours: float) -> datetime:
    return datetime.now(UTC) - timedelta(hours=hours)


def start(monkeypatch: pytest.MonkeyPatch, hours: float, deployment: str | None, run_count: int = 1) -> None:
    """Let this process be a run of that deployment, due so many hours ago."""
    now = SimpleNamespace(scheduled_start_time=hours_ago(hours), run_count=run_count)
    monkeypatch.setattr(missed_nights, "flow_run", now)
    monkeypatch.setattr(missed_nights, "deployment", SimpleNamespace(id=deployment))


@pytest.fixture
def nightly(tmp_path) -> str:
    """A deployment of nights."""
    name = f"missed-{uuid.uuid4().hex[:8]}"
    chain = Chain(name, "p", config="/c.yaml", home=str(tmp_path), gpu_pool=False, cron=None)
    deploy(chain)
    with get_client(sync_client=True) as client:
        return str(client.read_deployment_by_name(f"nightly/{chain.name}").id)


@pytest.fixture
def due(nightly: str) -> Callable:
    """Make a start that was due so many hours ago, and bring it to a state."""

    def make(hours: float, state=None) -> None:
        with get_client(sync_client=True) as client:
            wanted = Scheduled(scheduled_time=hours_ago(hours))
            run = client.create_flow_run_from_deployment(uuid.UUID(nightly), state=wanted)
            if state is not None:
                client.set_flow_run_state(run.id, state, force=True)

    return make


def late(monkeypatch: pytest.MonkeyPatch, hours: float, nightly: str) -> float:
    start(monkeypatch, hours, nightly)
    since = late_since()
    assert since is not None
    return since


@pytest.mark.parametrize(("hours", "run_count", "has_deployment"), [(0.0, 1, True), (9.0, 2, True), (9.0, 1, False)])
def test_on_time_tried_again_by_hand_or_of_no_deployment_is_not_late(
    monkeypatch: pytest.MonkeyPatch, hours: float, run_count: int, has_deployment: bool
) -> None:
    """A run that is tried again keeps the moment at which it was first due."""
    start(monkeypatch, hours, str(uuid.uuid4()) if has_deployment else None, run_count)
    assert late_since() is None


def test_one_missed_start_is_the_newest(monkeypatch, nightly, due) -> None:
    due(13)
    assert not is_too_old(late(monkeypatch, 13, nightly), LIMIT_HOURS)


@pytest.mark.parametrize("state", [None, Completed(name="Skipped"), Cancelled(message=LOST_THE_SLOT)])
def test_the_stalest_stands_for_a_newer_one_whatever_became_of_that(monkeypatch, nightly, due, state) -> None:
    """It holds the slot: a newer one is cancelled for it, now or in a moment, or waits and then finds its work done."""
    due(97)
    due(25, state)
    assert not is_too_old(late(monkeypatch, 97, nightly), LIMIT_HOURS)


def test_what_is_due_later_takes_nobody_s_place_yet(monkeypatch, nightly, due) -> None:
    due(97)
    due(73)
    due(-3)
    assert is_too_old(late(monkeypatch, 97, nightly), LIMIT_HOURS)


def test_a_single_missed_night_runs_and_another_late_start_finds_its_work_done(monkeypatch, nights, nightly) -> None:
    start(monkeypatch, 13, nightly)
    state = nights.run()
    assert "version 1 is champion" in state.message
    start(monkeypatch, 37, nightly)
    state = nights.run()
    assert (state.name, state.is_completed()) == ("Skipped", True)
    assert "night fake-0001 has caught up" in state.message
    assert len(NightBook(nights.home).nights()) == 1, "there were new data, and yet only one night"


def test_after_too_long_the_next_start_of_the_schedule_does_it(monkeypatch, nights, nightly) -> None:
    start(monkeypatch, 200, nightly)
    state = nights.run()
    assert state.name == "Skipped"
    assert "over 168 hours ago" in state.message
    assert NightBook(nights.home).nights() == []


def test_what_is_asked_for_again_is_wanted_whatever_ran_meanwhile(monkeypatch, nights, nightly) -> None:
    start(monkeypatch, 0, nightly)
    nights.run()
    start(monkeypatch, 1, nightly)
    assert "version 2 is champion" in nights.run(again=True).message

"""Which of several missed starts catches up, asked of a real server's flow runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from prefect import get_client
from prefect.states import Cancelled, Completed, Scheduled

from flows import missed_nights
from flows.deploy import deploy
from flows.deployments import Chain
from flows.missed_nights import fresher_start_was_cancelled

LIMIT_HOURS = 12.0
LOST_THE_SLOT = "Deployment concurrency limit reached."


@pytest.fixture
def due(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Make a start that was due so many hours ago, and bring it to a state; asked from a run of that deployment."""
    name = f"missed-{uuid.uuid4().hex[:8]}"
    chain = Chain(name, "p", config="/c.yaml", home=str(tmp_path), gpu_pool=False, cron=None)
    deploy(chain)
    with get_client(sync_client=True) as client:
        number = client.read_deployment_by_name(f"nightly/{chain.name}").id
        monkeypatch.setattr(missed_nights, "deployment", type("Running", (), {"id": str(number)}))

        def make(hours_ago: float, state=None) -> None:
            when = datetime.now(UTC) - timedelta(hours=hours_ago)
            run = client.create_flow_run_from_deployment(number, state=Scheduled(scheduled_time=when))
            if state is not None:
                client.set_flow_run_state(run.id, state, force=True)

        yield make


def test_the_fresh_ones_lost_their_slot_to_this_stale_one(due) -> None:
    due(49)
    due(25, Cancelled(message=LOST_THE_SLOT))
    due(1, Cancelled(message=LOST_THE_SLOT))
    assert fresher_start_was_cancelled(LIMIT_HOURS)


@pytest.mark.parametrize("state", [None, Completed(), Cancelled(message="not tonight, says Ada")])
def test_a_fresh_one_that_can_begin_has_begun_or_is_not_wanted(due, state) -> None:
    due(49)
    due(2, Cancelled(message=LOST_THE_SLOT))
    due(1, state)
    assert not fresher_start_was_cancelled(LIMIT_HOURS)


def test_nothing_fresh_is_due(due) -> None:
    due(49)
    due(25, Cancelled(message=LOST_THE_SLOT))
    due(-3)
    assert not fresher_start_was_cancelled(LIMIT_HOURS)


def test_without_a_deployment_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missed_nights, "get_client", None)
    assert not fresher_start_was_cancelled(LIMIT_HOURS)

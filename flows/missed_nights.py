"""Starts that were missed while the server was away come all at once, and the limit of one night at a time cancels all
but the first of them: the stalest. Somebody has to catch up all the same."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import deployment

_COLLISION = "concurrency limit"
"""What Prefect writes into the state of a run that it cancels because another one holds the slot."""


def fresher_start_was_cancelled(limit_hours: float) -> bool:
    """Whether every start of this deployment that is not stale was cancelled because this one holds the slot.

    Then nobody but this one can catch up. A start that a person cancelled, one that is still waiting and one that has
    begun say otherwise, and so does a run without a deployment.
    """
    number = deployment.id
    if number is None:
        return False
    now = datetime.now(UTC)
    fresh_since = now - timedelta(hours=limit_hours)
    due = FlowRunFilterExpectedStartTime.model_validate({"after_": fresh_since, "before_": now})
    with get_client(sync_client=True) as client:
        fresh = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[UUID(str(number))])),
            flow_run_filter=FlowRunFilter(expected_start_time=due),
        )
    return bool(fresh) and all(_lost_the_slot(run) for run in fresh)


def _lost_the_slot(run: FlowRun) -> bool:
    state = run.state
    return state is not None and state.is_cancelled() and _COLLISION in (state.message or "")

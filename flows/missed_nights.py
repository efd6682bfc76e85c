"""Starts that were missed while the server or the worker was away come all at once: one of them catches up.

The limit of one night at a time gives the slot to any of them, mostly the stalest, and cancels those that come for it
meanwhile; which one runs makes no difference, since a night takes the data that are there now. So whoever holds the
slot catches up, however old its own moment is, and a start that begins later looks into the home for what was done.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.sorting import FlowRunSort
from prefect.runtime import deployment, flow_run

from tasks.night import is_stale

_LATE_SECONDS = 600.0
"""A start that waited no longer than this for its worker comes on time."""


def late_since() -> float | None:
    """When this start was due (seconds since 1970) if it comes late, else None.

    A run that somebody tries again keeps the moment at which it was first due: it does not come late, it is wanted now.
    """
    due = flow_run.scheduled_start_time
    if due is None or deployment.id is None or flow_run.run_count > 1:
        return None
    return float(due.timestamp()) if time.time() - due.timestamp() > _LATE_SECONDS else None


def is_too_old(due: float, limit_hours: float) -> bool:
    """Whether the newest missed start of this deployment, this one or another, was due over `limit_hours` ago."""
    now = datetime.now(UTC)
    missed = FlowRunFilterExpectedStartTime.model_validate({"before_": now})
    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[UUID(str(deployment.id))])),
            flow_run_filter=FlowRunFilter(expected_start_time=missed),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=1,
        )
    dues = [due, *(run.expected_start_time.timestamp() for run in newest if run.expected_start_time is not None)]
    return is_stale(max(dues), now.timestamp(), limit_hours)

"""Nights that Prefect believes to run although nobody does: their worker was killed with them.

Prefect does not notice; such a run would look alive for ever. Whether a chain has a night on a home is known for
certain from its lock, which the kernel opens when the process is gone.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from tasks.locks import holder_of, night_lock_path

_STARTING_SECONDS = 300.0
_ENDING_SECONDS = 15.0


def close_lost_nights(
    home: Path, deployment: str, starting_seconds: float = _STARTING_SECONDS, ending_seconds: float = _ENDING_SECONDS
) -> list[str]:
    """Call the Running runs of `deployment` (flow/name) crashed when the chain has no night on `home`; say which.

    A run that began less than `starting_seconds` ago may not have come to its lock, one that has just let go of it may
    not have reported its end: the first is left alone, the second gets `ending_seconds`.
    """
    with get_client(sync_client=True) as client:
        if not _old_running(client, deployment, starting_seconds) or _night_at_work(home, deployment):
            return []
        time.sleep(ending_seconds)
        lost = [] if _night_at_work(home, deployment) else _old_running(client, deployment, starting_seconds)
        for run in lost:
            client.set_flow_run_state(run.id, Crashed(message="its process is gone; found by reconcile"), force=True)
    return [f"flow run {run.name} was Running without a process and is called crashed" for run in lost]


def _old_running(client: SyncPrefectClient, deployment: str, starting_seconds: float) -> list[FlowRun]:
    try:
        wanted = client.read_deployment_by_name(deployment).id
    except ObjectNotFound:
        return []
    runs = client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[wanted])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING]))
        ),
    )
    return [run for run in runs if _age(run) > starting_seconds]


def _age(run: FlowRun) -> float:
    return (datetime.now(UTC) - run.start_time).total_seconds() if run.start_time is not None else 0.0


def _night_at_work(home: Path, deployment: str) -> bool:
    """A night of this chain, which all its deployments are named after; it may wait for the night of another one."""
    return holder_of(night_lock_path(home, deployment.partition("/")[2])) is not None

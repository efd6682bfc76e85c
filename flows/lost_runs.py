"""Runs that Prefect believes to go on although nobody is at them: their worker was killed with them, or before them.

Prefect does not notice. Such a run would look alive for ever, and keep its place in the pool. Whether a run has a
process is known for certain from its own lock in the home, which the kernel opens when the process is gone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
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

from tasks.locks import holder_of, run_lock_path

FLOWS = ("nightly", "train", "watch", "approve", "rollback", "reconcile")
_AT_WORK = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]
"""States that take a place in the pool. A run that waits for a person's answer waits in its process."""
_STARTING_SECONDS = 300.0
_PENDING_SECONDS = 3600.0
"""From a worker's taking a run to its process: images are pulled, and nodes with a GPU are waited for."""
_ENDING_SECONDS = 15.0


def close_lost_runs(
    home: Path,
    chain: str,
    starting_seconds: float = _STARTING_SECONDS,
    ending_seconds: float = _ENDING_SECONDS,
    pending_seconds: float = _PENDING_SECONDS,
    workers_since: datetime | None = None,
) -> list[str]:
    """Call the runs of the chain's deployments crashed that have no process; say which.

    A run that began less than `starting_seconds` ago may not have come to its lock, one that has just let go of it may
    not have reported its end: the first is left alone, unless its lock is there; the second gets `ending_seconds`. One
    a worker took that has not begun is left alone for `pending_seconds`. Should it begin later all the same, its locks
    and leases keep it from doing anything twice. `workers_since`: when the workers began; nothing of before is coming.
    """
    if not home.is_dir():  # it says nothing about anybody
        return []
    patience = _Patience(starting_seconds, pending_seconds, workers_since)
    with get_client(sync_client=True) as client:
        if not _without_process(client, home, chain, patience):
            return []
        time.sleep(ending_seconds)
        lost = _without_process(client, home, chain, patience)
        for run in lost:
            client.set_flow_run_state(run.id, Crashed(message="its process is gone; found by reconcile"), force=True)
            run_lock_path(home, str(run.id)).unlink(missing_ok=True)
    return [f"flow run {run.name} went on without a process and is called crashed" for run in lost]


@dataclass(frozen=True)
class _Patience:
    """How long a run may be in its state without a lock."""

    starting_seconds: float
    pending_seconds: float
    workers_since: datetime | None

    def is_over(self, run: FlowRun) -> bool:
        if run.state is None:
            return False
        since = run.state.timestamp  # a run that is repeated began anew, whenever it first did
        if self.workers_since is not None and since < self.workers_since:
            return True
        granted = self.pending_seconds if run.state.is_pending() else self.starting_seconds
        return (datetime.now(UTC) - since).total_seconds() > granted


def _without_process(client: SyncPrefectClient, home: Path, chain: str, patience: _Patience) -> list[FlowRun]:
    runs = [run for flow in FLOWS for run in _under_way(client, f"{flow}/{chain}")]
    return [run for run in runs if _is_lost(run_lock_path(home, str(run.id)), run, patience)]


def _is_lost(lock: Path, run: FlowRun, patience: _Patience) -> bool:
    """A lock that is there and that nobody holds had its process; where there is none, it may be on its way."""
    return not holder_of(lock) and (lock.exists() or patience.is_over(run))


def _under_way(client: SyncPrefectClient, deployment: str) -> list[FlowRun]:
    try:
        wanted = client.read_deployment_by_name(deployment).id
    except ObjectNotFound:
        return []
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[wanted])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_AT_WORK))),
    )

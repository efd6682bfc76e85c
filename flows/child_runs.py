"""Runs of another deployment as their parent sees them: start with an idempotency key, look, cancel."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling, Crashed

from training.errors import StageError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

log = logging.getLogger(__name__)
_CANCEL_SECONDS = 20.0
_AWAY = (httpx.TransportError, PrefectHTTPStatusError)


@dataclass(frozen=True)
class Child:
    """A run at one moment. `ended` is its final state; `words` is its state's name, or that nobody answers."""

    running: bool
    ended: State | None
    words: str


class ChildRuns:
    """The runs of `deployment` (flow/name) that carry `tag`."""

    def __init__(self, deployment: str, tag: str) -> None:
        self.deployment = deployment
        self._tag = tag

    def next_number(self) -> int:
        """The number that the next key ends with: that of the newest run while it goes on, else the one after it.

        Not their count, since people delete runs: a key that was used before would find the run that has ended.
        Raises StageError when the server does not answer.
        """
        with _in_words(), get_client(sync_client=True) as client:
            runs = client.read_flow_runs(
                flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[self._tag])), sort=FlowRunSort.ID_DESC
            )
        taken = {_number_of(run): run for run in runs}
        newest = max(taken, default=-1)
        return newest + 1 if newest < 0 or _has_ended(taken[newest]) else newest

    def start(self, parameters: Mapping[str, Any], key: str) -> UUID:
        """Ask for a run, or find the one that was asked for under the same key. Raises StageError."""
        with _in_words():
            try:
                run = run_deployment(
                    self.deployment, parameters=dict(parameters), timeout=0, tags=[self._tag], idempotency_key=key
                )
            except ObjectNotFound:
                raise StageError(
                    f"there is no deployment {self.deployment} on the Prefect server",
                    "run `nightjar deploy CONFIG` against this server",
                ) from None
        assert isinstance(run, FlowRun)  # not the coroutine that asynchronous callers get
        return run.id

    def look(self, run_id: UUID) -> Child:
        """The run now. A server that does not answer is waited for: the caller has a deadline and signs of life.

        A run that somebody has deleted has come to nothing, like one that crashed.
        """
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(run_id).state
        except ObjectNotFound:
            ended: State[Any] = Crashed(message="somebody has deleted its run in Prefect")
            return Child(running=False, ended=ended, words="deleted")
        except _AWAY as error:
            log.warning("the Prefect server does not answer (%s); waiting for it", type(error).__name__)
            return Child(running=True, ended=None, words="unknown, since the Prefect server does not answer")
        if state is None:
            return Child(running=False, ended=None, words="not scheduled")
        words = state.name or str(state.type)
        return Child(state.is_running(), state if state.is_final() else None, words)

    def cancel(self, run_id: UUID, seconds: float = _CANCEL_SECONDS) -> None:
        """Ask the run's worker to end it; where no worker does within `seconds`, call it crashed. Never raises."""
        with suppress(Exception), get_client(sync_client=True) as client:
            client.set_flow_run_state(run_id, Cancelling(message="the night that asked for this run has ended"))
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                state = client.read_flow_run(run_id).state
                if state is None or state.is_final():
                    return
                time.sleep(0.5)
            client.set_flow_run_state(run_id, Crashed(message="its worker did not end it when asked"), force=True)


def _number_of(run: FlowRun) -> int:
    """What its key ends with; -1 for a run that somebody has tagged by hand."""
    number = (run.idempotency_key or "").rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _has_ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except _AWAY as error:
        raise StageError(
            f"the Prefect server does not answer ({type(error).__name__}), so no stage can be handed over",
            "start it; repeating the night goes on where it stopped",
        ) from error

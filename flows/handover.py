"""Handing a stage of a night to another pool, waiting for it with bounds, and taking it back when the night ends.

A child run outlives its parent, a parent waits for ever for a killed child, and a failed child raises nothing: so the
state is inspected, signs of life are exchanged on disk, cancellation is passed on, and success is the result.json.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from configs.schema.runtime import RuntimeConfig
from flows.child_runs import Child, ChildRuns
from flows.signs_of_life import Handover, Pulse
from tasks.launch import StageRun, run_stage
from tasks.launch_plan import LaunchPlan
from tasks.lease import renewed_lease
from tasks.progress import MetricsTail, Progress, listener
from tasks.ready_child import ReadyChildren
from tasks.result_index import FoundResult, find_result
from training.contract import StageSpec, write_spec
from training.errors import StageError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

DEPLOYMENT = "NIGHTJAR_TRAIN_DEPLOYMENT"
"""Environment variable that `nightjar deploy` gives to nights: the deployment that runs heavy stages, flow/name."""
HEAVY = frozenset({"sft", "reward", "distill", "annotate", "ppo", "evaluate"})
FOLDER = "handover"
_POLL_SECONDS = 2.0
_UNTAKEN_SECONDS = 60.0
_SILENT_LEASES = 3.0


def is_handed_over(stage: str) -> bool:
    """Whether another pool runs `stage`."""
    return bool(os.environ.get(DEPLOYMENT)) and stage in HEAVY


def shared_name(deployment: str, spec: StageSpec) -> str:
    """Who may share a run: what is computed, where its signs of life lie, and the deployment that is asked.

    Prefect knows an idempotency key once among all deployments of a flow, and a stage's key says nothing of its home:
    two homes with the same data would share a run whose life only one of them can see.
    """
    return hashlib.sha256("\n".join((deployment, spec.home, spec.key)).encode()).hexdigest()


def run_where_it_belongs(
    spec: StageSpec, directory: Path, plan: LaunchPlan, runtime: RuntimeConfig, ready: ReadyChildren | None = None
) -> StageRun:
    """Heavy stages on the deployment that NIGHTJAR_TRAIN_DEPLOYMENT names, everything else in a child of this process.

    Raises StageError. Whatever ends this call, the run it started has been told to end as well.
    """
    if not is_handed_over(spec.stage) or find_result(Path(spec.home), directory, spec.key) is not None:
        return run_stage(spec, directory, plan, ready=ready)
    started = time.monotonic()
    try:
        found, attempts = _HandedOver(os.environ[DEPLOYMENT], spec, directory, plan, runtime).until_done()
    except BaseException:
        listener().stage_ended(spec.stage, "failed", time.monotonic() - started)
        raise
    seconds = time.monotonic() - started
    listener().stage_ended(spec.stage, "done", seconds)
    return StageRun(found.result, found.directory, reused=False, attempts=attempts, seconds=seconds)


class _Lost(Exception):
    """The run ended, or fell silent, without a result and without saying that a person must act."""


class _HandedOver:
    """One stage on its way through another pool."""

    def __init__(
        self, deployment: str, spec: StageSpec, directory: Path, plan: LaunchPlan, runtime: RuntimeConfig
    ) -> None:
        self.spec = spec
        self.directory = directory
        self.plan = plan
        self.runtime = runtime
        self.name = shared_name(deployment, spec)
        self.runs = ChildRuns(deployment, f"nightjar-stage-{self.name[:32]}")
        self.unused = 0
        self.progress: Progress = listener()
        self.deadline = time.monotonic() + plan.timeout

    def until_done(self) -> tuple[FoundResult, int]:
        """Attempt after attempt, as often as the plan's retries allow."""
        for attempt in range(1, self.plan.retries + 2):
            self.progress.stage_started(self.spec.stage, attempt)
            try:
                return self._attempt(), attempt
            except _Lost as loss:
                if attempt > self.plan.retries:
                    raise StageError(
                        f"stage {self.spec.stage} {loss}, {attempt} time(s)",
                        "look at the worker of its pool; repeating the night goes on from the last checkpoint",
                    ) from None
                self.progress.stage_event(self.spec.stage, "died", {"attempt": attempt, "how": str(loss)})
        raise AssertionError("the loop above returns or raises")

    def _attempt(self) -> FoundResult:
        # Never one of this night's own again: its run may have been deleted, and its process may not know it yet.
        number = max(self.runs.next_number(), self.unused)
        self.unused = number + 1
        handover = Handover(Path(self.spec.home) / FOLDER / f"{self.name[:16]}-{number}")
        handover.prepare()
        write_spec(handover.folder, self.spec)
        parameters = {
            "directory": str(self.directory),
            "runtime": self.runtime.model_dump(mode="json"),
            "handover": str(handover.folder),
        }
        with renewed_lease(handover.night, self.plan.lease):
            # The number makes the key new after every end, and the same for two nights that ask at once or one that
            # was killed and asks again: they share the run.
            run_id = self.runs.start({"request": parameters}, key=f"{self.name}-{number}")
            try:
                state = self._end_of(run_id, handover.run)
            except BaseException:
                self.runs.cancel(run_id)
                raise
        result = self._result(state)
        shutil.rmtree(handover.folder, ignore_errors=True)
        return result

    def _end_of(self, run_id: UUID, holder: Path) -> State:
        tail = MetricsTail(self.directory, self.spec.stage, self.progress)
        asked = time.monotonic()
        told = False
        pulse: Pulse | None = None
        while True:
            child = self.runs.look(run_id)
            # Only a run that has begun can fall silent: it may have waited for its slot for longer than any lease.
            pulse = (pulse or Pulse(holder)) if child.running else None
            if child.ended is not None:
                tail.poll()
                return child.ended
            if time.monotonic() > self.deadline:
                raise StageError(
                    f"stage {self.spec.stage} was not done within {self.plan.timeout / 60:g} minutes; run {run_id} "
                    f"of {self.runs.deployment} was {child.words}",
                    "is a worker of its pool running? Else raise runtime.stage_timeout_minutes",
                )
            if pulse is not None and pulse.silent_for() > _SILENT_LEASES * self.plan.lease:
                raise _Lost(f"shows no life on its pool any more (run {run_id})")
            if not told and not child.running and time.monotonic() - asked > _UNTAKEN_SECONDS:
                told = True
                self.progress.stage_event(self.spec.stage, "waiting", {"message": self._untaken(child)})
            tail.poll()
            time.sleep(_POLL_SECONDS)

    def _untaken(self, child: Child) -> str:
        return (
            f"no worker has taken it for {_UNTAKEN_SECONDS:.0f} s (run of {self.runs.deployment} is {child.words}); "
            "start one with `prefect worker start --pool gpu`, or wait for the slot"
        )

    def _result(self, state: State) -> FoundResult:
        found = find_result(Path(self.spec.home), self.directory, self.spec.key)
        if found is not None:
            return found
        told = state.message or state.name or str(state.type)
        if state.is_completed():
            raise StageError(
                f"stage {self.spec.stage} is said to be done, but {self.directory} holds no valid result",
                "the home must be one and the same disk on the machines of both pools",
            )
        if state.is_cancelled():
            raise StageError(f"stage {self.spec.stage} was cancelled on its pool", "repeat the night to go on")
        if state.is_crashed():
            raise _Lost(f"died on its pool ({told})")
        raise StageError(told if self.spec.stage in told else f"stage {self.spec.stage}: {told}")

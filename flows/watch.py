"""The champion is measured again, on its own schedule; a limit broken often enough puts the previous one back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prefect import State, flow, task
from prefect.events import emit_event
from prefect.states import Completed, Failed
from pydantic import BaseModel, ConfigDict, Field

from configs.errors import NightjarError
from flows.embedded import SERVER
from flows.night_tasks import ACT
from flows.stopping import leave_if_embedded
from tasks.last_config import last_config
from tasks.launch import StageRun, run_stage
from tasks.measure import Measurement, measured, prepare_measurement
from tasks.night_state import NightBook
from tasks.preflight import check_tracking
from tasks.progress import listener
from tasks.reconcile import reconcile
from tasks.rollback import rollback
from tasks.site import Site
from tasks.watching import WatchState, record_watch

BREACHED_EVENT = "nightjar.champion.breached"
BREACHED = "Breached"


class WatchRequest(BaseModel):
    """Which home's champion is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: str = Field(description="Folder of runs, models and journal on the machine that measures.")


@flow(name="watch", persist_result=False, log_prints=False)
def watch(request: WatchRequest) -> State[Any]:
    """Measure the champion once. Ends Completed within the limits, `Breached` (failed) otherwise.

    After `watch.patience` breaches in a row the event `nightjar.champion.breached` is emitted where there is a server,
    whose automation runs the rollback; without a server this flow rolls back itself.
    """
    home = Path(request.home)
    try:
        config = last_config(home)
        site = Site.open(home, config.registry)
        check_tracking(site.tracking_uri, config.registry.reach_timeout_seconds)
        reconcile(site)
        measurement = prepare_measurement(site, config, NightBook(home))
        done = measure_task(measurement)
        version = measurement.champion.version
        state = record_watch(home, site.model, version, measured(done.result), config.watch)
        return _act(site, state)
    except NightjarError as error:
        return Failed(message=str(error))
    except BaseException as error:
        leave_if_embedded(error)
        raise


@task(name="measure", **ACT)
def measure_task(measurement: Measurement) -> StageRun:
    """The evaluate stage, in a child process."""
    return run_stage(measurement.spec, measurement.directory, measurement.plan)


def _act(site: Site, state: WatchState) -> State[Any]:
    if not state.breaches:
        told = f"version {state.version} of {site.model} keeps its limits"
        listener().note(told)
        return Completed(message=told)
    told = f"version {state.version} of {site.model}: {state.why} (patience {state.patience})"
    listener().note(told)
    if state.must_roll_back:
        _take_down(site, state)
    return Failed(name=BREACHED, message=told)


def _take_down(site: Site, state: WatchState) -> None:
    if os.environ.get(SERVER):
        resource = {"prefect.resource.id": f"nightjar.model.{site.model}", "nightjar.version": state.version}
        payload = {"why": state.why, "version": state.version, "home": str(site.home)}
        emit_event(event=BREACHED_EVENT, resource=resource, payload=payload)
        return
    done = rollback(site, why=state.why, away_from=state.version, by="watch")
    listener().note(done.sentence)

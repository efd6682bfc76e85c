"""The champion is measured again, on its own schedule; a limit broken often enough puts the previous one back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prefect import State, flow, task
from prefect.events import emit_event
from prefect.states import Completed, Failed

from configs.errors import NightjarError
from configs.schema import NightConfig
from flows.automations import BREACHED_EVENT, rollback_is_automatic
from flows.embedded import SERVER
from flows.flow_log import FlowLog
from flows.forms import Blocks, Chain, Form, Home, Model
from flows.handover import run_where_it_belongs
from flows.night_tasks import ACT
from flows.signs_of_life import shown_at_work
from tasks.admission import admit_watch
from tasks.chains import NoNightYet
from tasks.launch import StageRun
from tasks.measure import (
    ANOTHER_MEASURES,
    Measurement,
    MeasurementAtWork,
    measured,
    only_measurement,
    prepare_measurement,
)
from tasks.night_state import NightBook
from tasks.notify import notify
from tasks.progress import listener, listening
from tasks.reconcile import reconcile
from tasks.registry_errors import NoChampionYet
from tasks.rollback import rollback
from tasks.site import Site
from tasks.watching import WatchState, record_watch

BREACHED, SKIPPED, UNWATCHED = "Breached", "Skipped", "Unwatched"
"""Names of ends. The first and the last have told people themselves; no automation tells them a second time."""


class WatchRequest(Form):
    """Which home's champion is measured."""

    home: Home
    chain: Chain = None
    model: Model = None
    notify: Blocks = ()


@flow(name="watch", persist_result=False, log_prints=False)
def watch(request: WatchRequest) -> State[Any]:
    """Measure the champion once. Ends Completed within the limits, `Breached` (failed) otherwise, `Skipped` (completed)
    while it is being measured already or before the first promotion, `Unwatched` (failed) when it cannot be measured.

    After `watch.patience` breaches in a row the event `nightjar.champion.breached` is emitted where there is a server,
    whose automation runs the rollback. Without a server, without that automation, or when the same champion breaks its
    limits once more after the event, this flow rolls back itself. Whatever ends failed was told to `notify`.
    """
    home = Path(request.home)
    try:
        with shown_at_work(home), listening(FlowLog(listener())):
            site, config = admit_watch(home, request.chain, request.model)
            with only_measurement(home, site.model):
                return _act(site, config, _measure(site, config), request)
    except MeasurementAtWork as busy:
        return Completed(name=SKIPPED, message=f"{ANOTHER_MEASURES}: {busy.message}")
    except (NoNightYet, NoChampionYet) as fresh:
        return Completed(name=SKIPPED, message=f"nothing to measure yet: {fresh.message}")
    except NightjarError as error:
        whose = request.chain or request.model or request.home
        notify(request.notify, f"Nightjar: the champion of {whose} is not watched", str(error))
        return Failed(name=UNWATCHED, message=str(error))


def _measure(site: Site, config: NightConfig) -> WatchState:
    reconciled = reconcile(site)
    for sentence in (*reconciled.problems, *reconciled.busy, *reconciled.moved):
        listener().note(sentence)
    measurement = prepare_measurement(site, config, NightBook(site.home))
    done = measure_task(measurement, config)
    return record_watch(site.home, site.model, measurement.champion.version, measured(done.result), config.watch)


@task(name="measure", **ACT)
def measure_task(measurement: Measurement, config: NightConfig) -> StageRun:
    """The evaluate stage, here or on the GPU pool."""
    return run_where_it_belongs(measurement.spec, measurement.directory, measurement.plan, config.runtime)


def _act(site: Site, config: NightConfig, state: WatchState, request: WatchRequest) -> State[Any]:
    if not state.breaches:
        told = f"version {state.version} of {site.model} keeps its limits"
        listener().note(told)
        return Completed(message=told)
    told = f"version {state.version} of {site.model}: {state.why} (patience {state.patience})"
    listener().note(told)
    notify(request.notify, f"Nightjar: {site.model} breaks its limits", told)
    if state.must_roll_back and not _left_to_automation(site, config, state):
        told = f"{told}\n{_roll_back_here(site, state, request)}"
    return Failed(name=BREACHED, message=told)


def _left_to_automation(site: Site, config: NightConfig, state: WatchState) -> bool:
    """Emit the event where there is a server, so that the rollback is a run that people see. False: nobody hears it.

    Whether an event arrives is not known here. One is sent when patience is used up; a breach after it shows that it
    led to nothing, and a second one would lead there again.
    """
    if not os.environ.get(SERVER):
        return False
    if state.consecutive > state.patience:
        listener().note("the breach before this one was answered by no rollback: rolling back here")
        return False
    resource = {"prefect.resource.id": f"nightjar.model.{site.model}", "nightjar.version": state.version}
    whose = {"home": str(site.home), "chain": config.name, "model": site.model}
    payload = {"why": state.why, "version": state.version, **whose}
    emit_event(event=BREACHED_EVENT, resource=resource, payload=payload)
    if rollback_is_automatic(config.name, site.model):
        return True
    listener().note("no automation hears the event on this server (`nightjar deploy` makes it): rolling back here")
    return False


def _roll_back_here(site: Site, state: WatchState, request: WatchRequest) -> str:
    """The act itself, told like the rollback flow's; what came of it in a sentence."""
    try:
        done = rollback(site, why=state.why, away_from=state.version, by="watch")
    except NightjarError as error:
        listener().note(str(error))
        notify(request.notify, "Nightjar: rollback failed, the champion stays", f"{state.why}\n\n{error}")
        return f"the rollback failed, the champion stays: {error}"
    listener().note(done.sentence)
    if done.changed:
        notify(request.notify, f"Nightjar: {site.model} was rolled back", done.sentence)
    return done.sentence

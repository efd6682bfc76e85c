"""What follows a night that failed or crashed, and runs on a schedule: close what dead processes left open, tell."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from prefect import State, flow
from prefect.states import Completed, Failed
from pydantic import Field

from configs.errors import NightjarError
from flows.forms import Blocks, Chain, Form, Home, Model
from flows.lost_runs import close_lost_runs
from flows.night_tasks import reconcile_task
from flows.signs_of_life import shown_at_work
from tasks.chains import NoNightYet
from tasks.last_config import site_of
from tasks.notify import notify
from tasks.preflight import check_existing_tracking
from tasks.reconcile import Reconciled


class ReconcileRequest(Form):
    """Which home is put in order, and what made somebody ask."""

    home: Home
    chain: Chain = None
    model: Model = None
    deployment: Annotated[
        str | None,
        Field(
            title="Nights of",
            description="Deployment of the nights (flow/name); dead runs of its chain's deployments are closed.",
        ),
    ] = None
    occasion: Annotated[
        str, Field(title="Occasion", description="What happened, in words; set by the automation. Empty: the schedule.")
    ] = ""
    workers_since: Annotated[
        datetime | None,
        Field(
            title="Workers since",
            description="When the workers were started, where that is known: runs of before are not waited for.",
        ),
    ] = None
    notify: Blocks = ()


@flow(name="reconcile", persist_result=False, log_prints=False)
def reconcile(request: ReconcileRequest) -> State[Any]:
    """Revert half promotions, end runs of dead processes in MLflow and Prefect. Safe at any time, also twice.

    Ends failed when something is left for a person. Tells people when there was an occasion or something to do; a chain
    that waits for its first night has neither.
    """
    home = Path(request.home)
    try:
        with shown_at_work(home):
            chain = (request.deployment or "").partition("/")[2]
            lost = close_lost_runs(home, chain, workers_since=request.workers_since) if chain else []
            return _put_in_order(request, lost)
    except NightjarError as error:
        return Failed(message=str(error))


def _put_in_order(request: ReconcileRequest, lost: list[str]) -> State[Any]:
    try:
        site = site_of(Path(request.home), request.chain, request.model)
        check_existing_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
        done = reconcile_task(site)
    except NoNightYet as fresh:
        return _nothing_yet(request, lost, fresh)
    except NightjarError as error:
        _tell(request, [*lost, str(error)], "needs a person")
        return Failed(message=str(error))
    sentences = [*lost, *done.settled, *_closed(done), *done.problems]
    if request.occasion or sentences:
        _tell(request, [*sentences, *done.busy, *done.moved], "needs a person" if done.problems else "is in order")
    if done.problems:
        return Failed(message="\n".join(done.problems))
    # A promotion at work is a note on the run's page and no message: the next hour looks again.
    notes = [*sentences, *done.busy, *done.moved]
    return Completed(message="\n".join(notes) or "nothing to do: everything was closed properly")


def _nothing_yet(request: ReconcileRequest, lost: list[str], fresh: NoNightYet) -> State[Any]:
    """A night that was refused before it left anything is an occasion; the hour before the first night is none."""
    if request.occasion:
        _tell(request, [*lost, str(fresh)], "needs a person")
        return Failed(message=str(fresh))
    if lost:
        _tell(request, lost, "is in order")
    return Completed(message="\n".join([*lost, f"nothing to do yet: {fresh.message}"]))


def _closed(done: Reconciled) -> list[str]:
    return [f"MLflow run {run} of a dead process was ended as KILLED" for run in done.closed_runs]


def _tell(request: ReconcileRequest, sentences: list[str], how: str) -> None:
    body = "\n".join([request.occasion, *sentences]).strip() or "nothing was left open; the champion stands"
    notify(request.notify, f"Nightjar: {request.home} {how}", body)

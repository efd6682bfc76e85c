"""Putting the previous champion back: by the breach automation, or by a person at the form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prefect import State, flow, task
from prefect.states import Completed, Failed
from pydantic import Field

from configs.errors import NightjarError
from flows.forms import Blocks, Chain, Form, Home, Model
from flows.night_tasks import ACT, REGISTRY_RETRIES, is_passing
from flows.signs_of_life import shown_at_work
from tasks.last_config import site_of
from tasks.notify import notify
from tasks.preflight import check_existing_tracking
from tasks.rollback import Rollback
from tasks.rollback import rollback as take_down
from tasks.site import Site

UNCHANGED = "Unchanged"
BY_THE_FORM = "somebody by the form"
"""Who leaves the field empty; the automation names itself."""


class RollbackRequest(Form):
    """Which champion is taken down, and why."""

    home: Home
    chain: Chain = None
    model: Model = None
    why: Annotated[
        str,
        Field(title="Why", min_length=1, description="The reason; it becomes a tag of the version and bans it."),
    ]
    to: Annotated[
        str | None,
        Field(title="Return to version", description="Default: the champion before this one, as the journal knows it."),
    ] = None
    away_from: Annotated[
        str | None,
        Field(
            title="Only while this version is champion",
            description="A late or doubled event then takes nobody else down. Default: whoever is champion.",
        ),
    ] = None
    by: Annotated[str, Field(title="By", description="Who decides; it goes into the journal.")] = ""
    notify: Blocks = ()


@flow(name="rollback", persist_result=False, log_prints=False)
def rollback(request: RollbackRequest) -> State[Any]:
    """Put an earlier champion back. Doing it twice changes nothing.

    Ends Completed, `Unchanged` (completed) when it had been done before, and failed with the champion untouched when
    there is nothing sound to go back to.
    """
    try:
        with shown_at_work(Path(request.home)):
            site = site_of(Path(request.home), request.chain, request.model)
            check_existing_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
            done = rollback_task(site, request)
    except NightjarError as error:
        notify(request.notify, "Nightjar: rollback failed, the champion stays", f"{request.why}\n\n{error}")
        return Failed(message=str(error))
    if not done.changed:
        return Completed(name=UNCHANGED, message=done.sentence)
    notify(request.notify, f"Nightjar: {site.model} was rolled back", done.sentence)
    return Completed(message=done.sentence)


@task(name="rollback", retry_condition_fn=is_passing, **REGISTRY_RETRIES, **ACT)
def rollback_task(site: Site, request: RollbackRequest) -> Rollback:
    """The act itself; retried while MLflow is away or the lock is held."""
    return take_down(site, why=request.why, to=request.to, away_from=request.away_from, by=request.by or BY_THE_FORM)

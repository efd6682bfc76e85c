"""A person decides about a version that the gate could not judge; nobody's answer keeps the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from prefect import State, flow, get_client, task
from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, Running
from pydantic import Field

from configs.errors import NightjarError
from flows.forms import Blocks, Chain, Form, Home
from flows.night_tasks import ACT, REGISTRY_RETRIES, is_passing
from flows.signs_of_life import shown_at_work
from tasks.approval import AnswerTooLate, Undecided, promote_approved, refuse, undecided_night
from tasks.notify import notify
from tasks.promotion import Force, Promotion

KEPT = "Kept"
_POLL_SECONDS = 5


class ApproveRequest(Form):
    """Which night waits for a decision, and how long."""

    home: Home
    chain: Chain = None
    night: Annotated[
        str | None, Field(title="Night", description="As `nightjar status` shows it. Default: the newest undecided.")
    ] = None
    flow_run_id: Annotated[
        str | None, Field(title="Flow run of the night", description="Set by the automation, instead of the night.")
    ] = None
    timeout_hours: Annotated[
        float, Field(title="Wait, hours", gt=0.0, description="Without an answer the champion then stays.")
    ] = 12.0
    notify: Blocks = ()


class Decision(RunInput):
    """Promote this version, or keep the champion?"""

    promote: bool = Field(default=False, title="Promote", description="On: it becomes champion. Off: no change.")
    who: str = Field(min_length=1, title="Who", description="Your name; it becomes part of the version's record.")
    why: str = Field(min_length=1, title="Why", description="Your reason; it becomes part of the version's record.")


@flow(name="approve", persist_result=False, log_prints=False)
def approve(request: ApproveRequest) -> State[Any]:
    """Show an undecided night, wait for a person, and promote or keep.

    Ends Completed with the version promoted, or `Kept` (completed): refused, nobody answered, answered too
    late, or nothing to decide.
    """
    try:
        with shown_at_work(Path(request.home)):
            undecided = undecided_night(Path(request.home), request.night, request.flow_run_id, request.chain)
            if undecided is None:
                return Completed(name=KEPT, message="no night waits for a decision; the champion stays")
            return _carry_out(undecided, _ask(undecided, request), request)
    except NightjarError as error:
        notify(request.notify, "Nightjar: the approval failed, the champion stays", str(error))
        return Failed(message=str(error))


def _ask(undecided: Undecided, request: ApproveRequest) -> Decision | None:
    """The answer, or None when nobody gives one in time."""
    create_markdown_artifact(undecided.markdown, key="nightjar-approval", description=undecided.headline)
    notify(
        request.notify,
        f"Nightjar: {undecided.headline}",
        f"{undecided.markdown}\n\nResume the flow run `approve` in Prefect to answer; without one the champion stays.",
    )
    try:
        return pause_flow_run(
            wait_for_input=Decision.with_initial_data(description=undecided.markdown),
            timeout=max(1, round(request.timeout_hours * 3600)),
            poll_interval=_POLL_SECONDS,
        )
    except FlowPauseTimeout:
        _wake_up()
        return None


def _wake_up() -> None:
    """Call this run Running again: the server turns whatever a timed-out pause ends in into a failure."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(str(flow_run.id)), Running(), force=True)


def _carry_out(undecided: Undecided, decision: Decision | None, request: ApproveRequest) -> State[Any]:
    if decision is None:
        told = f"nobody decided within {request.timeout_hours:g} hours; the champion stays"
        return _kept(request, "the champion stays", told)
    try:
        if not decision.promote:
            told = f"{decision.who} keeps the champion: {decision.why}"
            refuse_task(undecided, told)
            return _kept(request, "the champion stays", told)
        done = promote_task(undecided, Force(decision.who, decision.why))
    except AnswerTooLate as late:
        return _kept(request, f"the answer of {decision.who} came too late", str(late))
    told = f"version {done.version} is champion, approved by {decision.who}: {decision.why}"
    notify(request.notify, f"Nightjar: {undecided.site.model} was promoted", told)
    return Completed(message=told)


def _kept(request: ApproveRequest, subject: str, told: str) -> State[Any]:
    notify(request.notify, f"Nightjar: {subject}", told)
    return Completed(name=KEPT, message=told)


@task(name="promote approved", retry_condition_fn=is_passing, **REGISTRY_RETRIES, **ACT)
def promote_task(undecided: Undecided, force: Force) -> Promotion:
    """The version as champion, or everything as it was."""
    return promote_approved(undecided, force)


@task(name="keep the champion", retry_condition_fn=is_passing, **REGISTRY_RETRIES, **ACT)
def refuse_task(undecided: Undecided, sentence: str) -> None:
    """The answer written down; retried while another one is being carried out."""
    refuse(undecided, sentence)

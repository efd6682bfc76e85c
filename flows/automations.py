"""What the Prefect server does by itself, as code: a breach rolls back, a night that ended badly is tidied and told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from prefect.automations import AutomationCore

BREACHED_EVENT = "nightjar.champion.breached"
BAD_ENDS = ("Failed", "Crashed", "TimedOut", "Rejected", "Undecided")
"""State names of nights and watches that a person should hear of; a cancelled one was a person's own doing, and a watch
that ends `Breached` or `Unwatched` has told people itself."""
_STATE_EVENT = "prefect.flow-run."


@dataclass(frozen=True)
class Reaction:
    """One automation: events of a model or of a deployment's runs, and the deployment (flow/name) that answers."""

    name: str
    description: str
    expect: tuple[str, ...]
    runs: str
    parameters: Mapping[str, Any]
    model: str | None = None
    after_runs_of: tuple[str, ...] = ()


def rollback_reaction(chain: str, model: str, notify: tuple[str, ...] = ()) -> Reaction:
    """A broken champion is taken down, as long as it is still champion."""
    wanted = {
        "home": "{{ event.payload.home }}",
        "chain": "{{ event.payload.chain }}",
        "model": "{{ event.payload.model }}",
        "why": "{{ event.payload.why }}",
        "away_from": "{{ event.payload.version }}",
        "by": "automation",
        "notify": list(notify),
    }
    return Reaction(
        name=f"nightjar {chain}: breach rolls back",
        description=f"When watch finds {model} beyond its limits often enough, the previous champion is put back.",
        expect=(BREACHED_EVENT,),
        model=model,
        runs=f"rollback/{chain}",
        parameters={"request": wanted},
    )


def reconcile_reaction(chain: str, home: str, notify: tuple[str, ...] = ()) -> Reaction:
    """After a night that failed or crashed, or a watch that died: close what it left open, and tell."""
    occasion = "{{ flow.name }} {{ flow_run.name }} ended {{ flow_run.state.name }}: {{ flow_run.state.message }}"
    nights = f"nightly/{chain}"
    wanted = {"home": home, "chain": chain, "deployment": nights, "occasion": occasion, "notify": list(notify)}
    return Reaction(
        name=f"nightjar {chain}: bad night is reconciled",
        description="When a night fails, crashes or is not promoted, or a watch dies: reconcile, and tell the blocks.",
        expect=tuple(_STATE_EVENT + name for name in BAD_ENDS),
        after_runs_of=(nights, f"watch/{chain}"),
        runs=f"reconcile/{chain}",
        parameters={"request": wanted},
    )


def approval_reaction(chain: str, home: str, hours: float, notify: tuple[str, ...] = ()) -> Reaction:
    """After a night that the gate could not judge: ask a person."""
    night = {"chain": chain, "flow_run_id": "{{ flow_run.id|string }}"}
    wanted = {"home": home, **night, "timeout_hours": hours, "notify": list(notify)}
    return Reaction(
        name=f"nightjar {chain}: undecided night asks",
        description=f"When a night ends Undecided a person is asked; unanswered for {hours:g} h the champion stays.",
        expect=(_STATE_EVENT + "Undecided",),
        after_runs_of=(f"nightly/{chain}",),
        runs=f"approve/{chain}",
        parameters={"request": wanted},
    )


def automation_of(reaction: Reaction, deployment_ids: Mapping[str, UUID]) -> AutomationCore:
    """The automation for Prefect. `deployment_ids` by flow/name. Owned by the deployment that it runs."""
    from prefect.automations import AutomationCore, EventTrigger
    from prefect.events.actions import RunDeployment

    related: dict[str, str | list[str]] = {}
    if reaction.after_runs_of:
        theirs = [f"prefect.deployment.{deployment_ids[name]}" for name in reaction.after_runs_of]
        related = {"prefect.resource.role": "deployment", "prefect.resource.id": theirs}
    match: dict[str, str | list[str]] = {}
    if reaction.model is not None:
        match = {"prefect.resource.id": f"nightjar.model.{reaction.model}"}
    answering = deployment_ids[reaction.runs]
    return AutomationCore(
        name=reaction.name,
        description=reaction.description,
        tags=["nightjar"],
        trigger=EventTrigger(
            expect=set(reaction.expect), match=match, match_related=related, threshold=1, within=timedelta(0)
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=answering,
                parameters=dict(reaction.parameters),
                job_variables=None,
            ),
        ],
        owner_resource=f"prefect.deployment.{answering}",
    )


def rollback_is_automatic(chain: str, model: str) -> bool:
    """Whether the server that this process talks to has an enabled automation that hears a breach of this very model.

    One that was deployed before the model got another name does not.
    """
    import httpx
    from prefect import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    name = rollback_reaction(chain, model).name
    try:
        with get_client(sync_client=True) as client:
            found = client.read_automations_by_name(name)
    except (httpx.HTTPError, PrefectHTTPStatusError):
        return False
    return any(automation.enabled and _hears_breach(automation, model) for automation in found)


def _hears_breach(automation: AutomationCore, model: str) -> bool:
    from prefect.events import Resource
    from prefect.events.schemas.automations import EventTrigger
    from prefect.events.schemas.events import ResourceSpecification

    trigger = automation.trigger
    if not isinstance(trigger, EventTrigger) or BREACHED_EVENT not in trigger.expect:
        return False
    wanted = ResourceSpecification.model_validate(trigger.match)
    return wanted.matches(Resource({"prefect.resource.id": f"nightjar.model.{model}"}))

"""What the automations hand to the flows that answer, rendered as the Prefect server renders it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from prefect.server.events.actions import RunDeployment
from prefect.server.schemas.core import Flow, FlowRun
from prefect.server.schemas.states import Failed
from prefect.server.utilities.user_templates import render_user_template_sync

from flows.automations import Reaction, approval_reaction, reconcile_reaction, rollback_reaction

REACTIONS = (
    rollback_reaction("team", "team-policy"),
    reconcile_reaction("team", "/home/of/nights"),
    approval_reaction("team", "/home/of/nights", 12.0),
)
NUMBER = UUID("01a22de8-a293-7a8f-9762-5d4c9013cf5d")
PAYLOAD = {"home": "/home/of/nights", "chain": "team", "model": "team-policy", "why": 'is "0.1"', "version": "2"}


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> None:
    """None is needed here."""


def rendered(reaction: Reaction) -> dict[str, Any]:
    state = Failed(name="Undecided", message="the interval straddles the limit")
    run = FlowRun(id=NUMBER, flow_id=NUMBER, name="a night", state=state)
    context = {"flow": Flow(id=NUMBER, name="nightly"), "flow_run": run, "event": {"payload": PAYLOAD}}
    return dict(_filled(reaction.parameters["request"], context))


def _filled(parameters: dict[str, Any], context: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in parameters.items():
        if not (isinstance(value, str) and "{{" in value):
            yield name, value
            continue
        wrapped = RunDeployment._wrap_v1_template(value)
        if wrapped["__prefect_kind"] == "json":
            yield name, json.loads(render_user_template_sync(wrapped["value"]["template"], context))
        else:
            yield name, render_user_template_sync(wrapped["template"], context)


@pytest.mark.parametrize("reaction", REACTIONS, ids=lambda reaction: reaction.runs)
def test_every_template_can_be_rendered(reaction: Reaction) -> None:
    assert all("{{" not in str(value) for value in rendered(reaction).values())


def test_the_run_that_was_undecided_is_named_by_its_number() -> None:
    """The server writes single expressions as JSON, which knows no UUID: as such the automation would never run."""
    assert rendered(approval_reaction("team", "/home/of/nights", 12.0))["flow_run_id"] == str(NUMBER)


def test_the_payload_of_a_breach_arrives_as_it_was_sent() -> None:
    told = rendered(rollback_reaction("team", "team-policy"))
    assert (told["why"], told["away_from"], told["chain"]) == (PAYLOAD["why"], "2", "team")


def test_a_bad_night_is_told_in_a_sentence() -> None:
    told = rendered(reconcile_reaction("team", "/home/of/nights"))
    assert told["occasion"] == "nightly a night ended Undecided: the interval straddles the limit"

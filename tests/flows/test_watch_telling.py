"""A watch that measures nothing: told to people when something is wrong, and to nobody before there is a champion."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.states import Crashed, Failed

from flows.deploy import deploy
from flows.deployments import Chain
from flows.lost_runs import FLOWS
from flows.watch import UNWATCHED, WatchRequest, watch
from tasks.journal import Entry, Journal, new_act
from tests.stored_nights import run_night
from tests.webhook import BLOCK, Webhook, listening_webhook


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with listening_webhook() as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One night of a chain with limits; MLflow's database is not there."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = run_night(tmp_path, "chat") / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"limits": []', '"limits": [{"metric": "reward", "min": 0}]'))
    return tmp_path


def measure(home: Path, chain: str = "chat"):
    return watch(WatchRequest(home=str(home), chain=chain, notify=(BLOCK,)), return_state=True)


def test_one_that_cannot_measure_says_what_is_wrong_and_what_to_do(home: Path, webhook: Webhook) -> None:
    state = measure(home)
    assert (state.name, state.is_failed()) == (UNWATCHED, True)
    (message,) = webhook.heard
    assert message["subject"] == "Nightjar: the champion of chat is not watched"
    assert "mlflow.db is missing" in message["text"]
    assert "what to do:" in message["text"]


def test_before_the_first_promotion_nobody_is_told(home: Path, webhook: Webhook, empty_database: Path) -> None:
    shutil.copy(empty_database, home / "mlflow.db")
    for chain, why in (("chat", "has no champion yet"), ("tomorrow", "has no chain 'tomorrow'")):
        state = measure(home, chain)
        assert (state.name, state.is_completed()) == ("Skipped", True), state.message
        assert "nothing to measure yet: " in state.message
        assert why in state.message
    assert webhook.heard == []


def test_a_champion_whose_alias_was_removed_is_no_early_day(home: Path, webhook: Webhook, empty_database: Path) -> None:
    shutil.copy(empty_database, home / "mlflow.db")
    act = new_act()
    for event in ("pending", "verified"):
        Journal(home).write(Entry(event=event, model="chat-policy", act=act, candidate="1"))
    assert measure(home).name == UNWATCHED
    assert "is gone, and the journal knows version 1" in webhook.heard[0]["text"]


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[str]:
    """A chain of its own on the server, removed with its automations: other tests count what stands there."""
    name = f"dies-{uuid.uuid4().hex[:8]}"
    deploy(Chain(name, "p", config="/c.yaml", home=str(tmp_path)))
    yield name
    with get_client(sync_client=True) as client:
        for automation in client.read_automations():  # their owners take them along, but later
            if automation.name.startswith(f"nightjar {name}:"):
                client.delete_automation(automation.id)
        for flow in FLOWS:
            client.delete_deployment(client.read_deployment_by_name(f"{flow}/{name}").id)


def test_one_that_dies_is_answered_by_the_automation_and_one_that_told_by_itself_is_not(chain: str) -> None:
    """The runs are made up; what follows is the server's own doing."""
    with get_client(sync_client=True) as client:
        watching, answering = (client.read_deployment_by_name(f"{flow}/{chain}").id for flow in ("watch", "reconcile"))

        def occasions() -> list[str]:
            runs = client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[answering])))
            return [told for run in runs if (told := run.parameters["request"].get("occasion"))]

        for state in (Failed(name=UNWATCHED), Failed(name="Breached"), Crashed(message="exit code 137")):
            run = client.create_flow_run_from_deployment(watching)
            client.set_flow_run_state(run.id, state, force=True)
        deadline = time.monotonic() + 120
        while not occasions() and time.monotonic() < deadline:
            time.sleep(1)
        assert occasions() == [f"watch {run.name} ended Crashed: exit code 137"]

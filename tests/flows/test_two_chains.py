"""Two chains in one home: every command acts on the one that is named, and on none when none is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from configs.errors import NightjarError
from flows import reconcile as reconcile_module
from flows import rollback as rollback_module
from flows import watch as watch_module
from flows.approve import ApproveRequest, approve
from flows.automations import rollback_reaction
from flows.cli import app
from flows.deployments import Chain, deployments_of, reactions_of
from flows.reconcile import ReconcileRequest, reconcile
from flows.registry_commands import answer, reconcile_now, roll_back
from flows.rollback import RollbackRequest, rollback
from flows.status_view import status_view
from flows.watch import WatchRequest, watch
from tasks import admission
from tasks import rollback as rollback_acts
from tasks.approval import undecided_night
from tasks.last_config import site_of
from tasks.measure import only_measurement
from tasks.night_state import NightBook
from tasks.reconcile import Reconciled
from tasks.registry import CHAMPION, ModelRegistry
from tasks.rollback import Rollback
from tests.stored_nights import run_night


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`quickstart` ran first, `chat` last."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_night(tmp_path, "quickstart", when=1000.0)
    run_night(tmp_path, "chat", when=2000.0)
    return tmp_path


@pytest.fixture
def acted_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models that an act reached."""
    models: list[str] = []

    def take_down(site, **how):
        models.append(site.model)
        return Rollback(True, "2", "1", f"{site.model} is at version 1 again")

    def tidy(site):
        models.append(site.model)
        return Reconciled()

    for module in (rollback_module, reconcile_module):
        monkeypatch.setattr(module, "check_existing_tracking", lambda uri, seconds: None)
    monkeypatch.setattr("tasks.preflight.check_existing_tracking", lambda uri, seconds: None)
    monkeypatch.setattr(admission, "check_existing_tracking", lambda uri, seconds: None)
    monkeypatch.setattr(admission, "require_limits", lambda config: None)
    monkeypatch.setattr(ModelRegistry, "alias", lambda registry, alias: "1")
    monkeypatch.setattr(rollback_module, "take_down", take_down)
    monkeypatch.setattr(rollback_acts, "rollback", take_down)
    monkeypatch.setattr(reconcile_module, "reconcile_task", tidy)
    monkeypatch.setattr("tasks.reconcile.reconcile", tidy)
    monkeypatch.setattr(watch_module, "reconcile", tidy)
    return models


def test_the_rollback_flow_takes_down_the_champion_that_is_named(home: Path, acted_on: list[str]) -> None:
    for named in ({"model": "quickstart-policy"}, {"chain": "quickstart"}):
        state = rollback(RollbackRequest(home=str(home), why="curt", **named), return_state=True)
        assert state.is_completed(), state.message
    refused = rollback(RollbackRequest(home=str(home), why="curt"), return_state=True)
    assert refused.is_failed()
    assert "quickstart (model quickstart-policy), chat (model chat-policy)" in refused.message
    assert acted_on == ["quickstart-policy"] * 2


def test_the_watch_measures_the_chain_that_is_named(home: Path, acted_on: list[str], monkeypatch) -> None:
    measured = []

    def prepare(site, config, book):
        measured.append((site.model, config.name))
        raise NightjarError("enough seen")

    monkeypatch.setattr(watch_module, "prepare_measurement", prepare)
    assert "holds 2 chains" in watch(WatchRequest(home=str(home)), return_state=True).message
    assert watch(WatchRequest(home=str(home), chain="quickstart"), return_state=True).message == "enough seen"
    assert measured == [("quickstart-policy", "quickstart")]


def test_a_watch_beside_another_one_of_its_model_measures_nothing(home: Path, acted_on, monkeypatch) -> None:
    """Both would count against the patience, with measurements of the same minutes."""
    monkeypatch.setattr(watch_module, "prepare_measurement", None)
    with only_measurement(home, "chat-policy"):
        state = watch(WatchRequest(home=str(home), chain="chat"), return_state=True)
    assert (state.name, state.is_completed()) == ("Skipped", True)
    assert "another measurement is running" in state.message


def test_reconcile_puts_the_named_chain_in_order(home: Path, acted_on: list[str]) -> None:
    assert reconcile(ReconcileRequest(home=str(home)), return_state=True).is_failed()
    assert reconcile(ReconcileRequest(home=str(home), chain="quickstart"), return_state=True).is_completed()
    reconcile_now(home, model="quickstart-policy")
    assert acted_on == ["quickstart-policy"] * 2


def test_a_chain_that_was_just_deployed_waits_for_its_first_night_and_nobody_is_called(
    home: Path, acted_on: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    told: list[str] = []
    monkeypatch.setattr(reconcile_module, "notify", lambda blocks, subject, body: told.append(body) or [])

    def hourly(of: Path, chain: str, **more: str):
        return reconcile(ReconcileRequest(home=str(of), chain=chain, **more), return_state=True)

    for fresh in (home, tmp_path_factory.mktemp("empty"), home / "not-made-yet"):
        state = hourly(fresh, "tomorrow")
        assert state.is_completed(), state.message
        assert "nothing to do yet" in str(state.message)
    assert (told, acted_on) == ([], [])
    refused = hourly(home, "tomorrow", occasion="night a ended Failed: no data")
    assert refused.is_failed()
    assert "no data" in told[0]
    (home / "runs/chat-0001/config.json").write_text("{")
    damaged = hourly(home, "chat")
    assert damaged.is_failed(), "nights that cannot be read are not the same as none"
    assert "of chain chat's 1 nights can be read" in str(damaged.message)


def test_the_commands_take_a_chain_or_a_model(home: Path, acted_on: list[str]) -> None:
    with pytest.raises(NightjarError, match="holds 2 chains"):
        roll_back(home, None, "curt")
    for option in (["--chain", "quickstart"], ["--model", "quickstart-policy"]):
        done = CliRunner().invoke(app, ["rollback", "--why", "curt", "--home", str(home), *option])
        assert "quickstart-policy is at version 1 again" in done.output
    assert acted_on == ["quickstart-policy"] * 2


def test_generate_asks_the_champion_of_the_named_chain(home: Path, monkeypatch) -> None:
    asked = []

    def reply(site, address, prompt, tokens):
        asked.append(address)
        return "yes"

    monkeypatch.setattr("flows.registry_commands.ask", reply)
    (home / "mlflow.db").write_bytes(b"not empty")
    assert answer(home, None, "well?", 8, chain="quickstart") == "yes"
    assert answer(home, "models:/chat-policy/3", "well?", 8) == "yes"
    assert asked == ["models:/quickstart-policy@champion", "models:/chat-policy/3"]
    with pytest.raises(NightjarError, match="holds 2 chains"):
        answer(home, None, "well?", 8)


def test_status_shows_every_chain_and_what_cannot_be_read(home: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, home / "mlflow.db")
    for chain in ("quickstart", "chat"):
        registry = site_of(home, chain).registry
        registry.ensure()
        registry.client.create_model_version(f"{chain}-policy", "nowhere")
    site_of(home, "quickstart").registry.put_alias(CHAMPION, "1")
    broken = run_night(home, "chat", 2, when=3000.0)
    (broken / "night.json").write_text('{"night": "chat-0002"}')
    console = Console(width=300)
    with console.capture() as capture:
        console.print(status_view(home, 10))
    shown = capture.get()
    assert "quickstart-policy: champion version 1, previous none" in shown
    assert "chat-policy: champion none, previous none" in shown
    assert "quickstart-0001" in shown
    assert f"open {broken / 'night.json'}: not a night's state" in shown


def test_each_chain_is_asked_about_its_own_undecided_night(home: Path) -> None:
    book = NightBook(home)
    waiting = {"verdict": "INCONCLUSIVE", "version": "4"}
    book.change(book.load("quickstart-0001"), **waiting)
    book.change(book.load("chat-0001"), verdict="PASS", version="9", promoted=True)
    asked = undecided_night(home)
    assert asked is not None, "a later night of another chain overtakes nobody"
    assert (asked.state.night, asked.site.model) == ("quickstart-0001", "quickstart-policy")
    assert undecided_night(home, chain="chat") is None
    book.change(book.load("chat-0001"), promoted=False, **waiting)
    refused = approve(ApproveRequest(home=str(home)), return_state=True)
    assert "2 nights wait for a decision" in refused.message
    named = undecided_night(home, night="quickstart-0001")
    assert named is not None
    assert named.site.model == "quickstart-policy"


def test_deployments_and_automations_name_their_chain() -> None:
    chain = Chain(name="chat", model="chat-policy", config="/c.yaml", home="/h", approval_hours=1)
    for deployment in deployments_of(chain):
        if deployment.flow not in ("nightly", "train"):
            assert deployment.parameters["request"]["chain"] == "chat", deployment.full_name
    for reaction in reactions_of(chain):
        assert reaction.parameters["request"]["chain"] in ("chat", "{{ event.payload.chain }}"), reaction.name
    wanted = rollback_reaction("chat", "chat-policy").parameters["request"]
    assert wanted["model"] == "{{ event.payload.model }}"
    late = RollbackRequest.model_validate({"home": "/h", "why": "w", "chain": "", "model": ""})
    assert (late.chain, late.model) == (None, None), "an event of an older watch names neither"

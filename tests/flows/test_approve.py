"""A person's answer to an undecided night, through Prefect's own pause and resume."""

from __future__ import annotations

import threading
import time

import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterState
from prefect.client.schemas.filters import FlowRunFilterStateType as StateTypes
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError

from flows import approve as approve_module
from flows.approve import ApproveRequest, approve
from tasks import approval
from tasks.last_config import site_of
from tasks.night_state import NightBook
from tasks.promotion import Force, Promotion
from tasks.registry import CHAMPION
from training.errors import ContractError

pytestmark = pytest.mark.usefixtures("light_registry")


@pytest.fixture
def undecided(nights, monkeypatch):
    """A home whose first night was promoted and whose second one is undecided."""
    monkeypatch.setattr(approve_module, "_POLL_SECONDS", 0.2)
    assert nights.run().is_completed()
    with monkeypatch.context() as unsure:
        unsure.setenv("NIGHTJAR_FAKE", "evaluate=unsure")
        state = nights.run()
    assert state.name == "Undecided", state.message
    return nights


@pytest.fixture
def promoted(monkeypatch) -> list:
    """Promotions that a person's word led to; the alias moves for real."""
    forces = []

    def promote(site, candidate, *, judged_against, night, force):
        assert site.registry.alias(CHAMPION) == judged_against
        site.registry.put_alias(CHAMPION, candidate)
        forces.append((candidate, night, force.who, force.why))
        return Promotion(candidate, judged_against, True, 0.0)

    monkeypatch.setattr(approval, "promote", promote)
    return forces


class Answer(threading.Thread):
    """Waits for the paused run of `approve`, and resumes it with what a person would type."""

    def __init__(self, **typed: object) -> None:
        super().__init__(daemon=True)
        self.typed = typed
        self.refused: list[str] = []
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 60
        with get_client(sync_client=True) as client:
            while time.monotonic() < deadline:
                for run in self._paused(client):
                    if self._resume(client, run.id):
                        return
                time.sleep(0.2)

    def _resume(self, client, run_id) -> bool:
        try:
            status = client.resume_flow_run(run_id, run_input=self.typed).status.value
        except PrefectHTTPStatusError as error:
            self.refused.append(error.response.text)
            return True
        if status == "REJECT":
            self.refused.append(status)
        return status in ("ACCEPT", "REJECT")

    @staticmethod
    def _paused(client):
        return client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=["approve"])),
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=StateTypes(any_=[StateType.PAUSED]))),
        )


def state_of(nights, index: int = 2):
    return NightBook(nights.home).load(f"fake-{index:04d}")


def note_of(nights, night: str) -> str:
    client = site_of(nights.home).registry.client
    experiment = client.get_experiment_by_name("nightjar").experiment_id
    (run,) = client.search_runs([experiment], f"attributes.run_name = '{night}'")
    assert run.info.status == "FINISHED"
    return run.data.tags["mlflow.note.content"]


def champion(nights) -> str | None:
    return site_of(nights.home).registry.alias(CHAMPION)


def ask(nights, **request):
    return approve(ApproveRequest(home=str(nights.home), **request), return_state=True)


def test_yes_promotes_and_says_who_and_why(undecided, promoted) -> None:
    answer = Answer(promote=True, who="Ada", why="read thirty answers, all better")
    state = ask(undecided, flow_run_id=state_of(undecided).flow_run_id)
    answer.join(30)
    assert state.is_completed(), state.message
    assert state.name == "Completed"
    assert "approved by Ada: read thirty answers" in state.message
    assert promoted == [("2", "fake-0002", "Ada", "read thirty answers, all better")]
    assert champion(undecided) == "2"
    night = state_of(undecided)
    assert (night.promoted, night.verdict) == (True, "INCONCLUSIVE")
    assert "Ada" in night.reason
    assert night.owed == ()
    told = "promoted: version 2 is champion; approved by Ada: read thirty answers, all better, although the gate says"
    assert told in note_of(undecided, "fake-0002")
    assert ask(undecided).name == "Kept", "nobody is asked twice"


def test_no_keeps_the_champion_and_is_written_down(undecided, promoted) -> None:
    Answer(promote=False, who="Ada", why="too curt")
    state = ask(undecided)
    assert (state.name, state.is_completed()) == ("Kept", True)
    assert "Ada keeps the champion: too curt" in state.message
    assert (promoted, champion(undecided)) == ([], "1")
    assert state_of(undecided).reason == "Ada keeps the champion: too curt"
    assert "Ada keeps the champion: too curt" in note_of(undecided, "fake-0002")
    assert "no night waits" in ask(undecided).message


def test_an_answer_that_comes_after_another_one_changes_nothing(undecided, promoted, monkeypatch) -> None:
    told = []

    def ask_two(form, request):
        other = approval.undecided_night(undecided.home)
        approval.promote_approved(other, Force("Ada", "read thirty answers"))
        return approve_module.Decision(promote=False, who="Bob", why="too curt")

    monkeypatch.setattr(approve_module, "_ask", ask_two)
    monkeypatch.setattr(approve_module, "notify", lambda blocks, subject, body: told.append(subject))
    state = ask(undecided)
    assert (state.name, told) == ("Kept", ["Nightjar: the answer of Bob came too late"])
    assert "approved by Ada: read thirty answers" in state.message
    assert (champion(undecided), state_of(undecided).promoted) == ("2", True)
    assert "Ada" in state_of(undecided).reason


def test_no_answer_keeps_the_champion(undecided, promoted) -> None:
    state = ask(undecided, timeout_hours=1 / 3600)
    assert (state.name, state.is_completed()) == ("Kept", True)
    assert "nobody decided" in state.message
    assert (promoted, champion(undecided)) == ([], "1")
    assert state_of(undecided).reason is None, "it may be asked again"


def test_an_answer_without_a_name_is_refused(undecided, promoted) -> None:
    answer = Answer(promote=True, who="", why="")
    state = ask(undecided, timeout_hours=6 / 3600)
    answer.join(30)
    assert answer.refused
    assert state.name == "Kept"
    assert (promoted, champion(undecided)) == ([], "1")


def test_who_is_not_waiting_is_not_asked(nights, promoted) -> None:
    assert nights.run().is_completed()
    assert ask(nights).name == "Kept", "a promoted night"
    assert ask(nights, night="fake-0001").name == "Kept"
    unknown = ask(nights, night="fake-0009")
    assert unknown.is_failed()
    assert "no night 'fake-0009'" in unknown.message


def test_only_the_newest_judged_night_can_wait(undecided, promoted) -> None:
    home = undecided.home
    assert approval.undecided_night(home) is not None
    assert approval.undecided_night(home, flow_run_id="another") is None
    book = NightBook(home)
    book.save(state_of(undecided).model_copy(update={"night": "fake-0003", "index": 3, "verdict": "FAIL"}))
    assert approval.undecided_night(home, "fake-0002") is None, "a later night was judged since"
    with pytest.raises(ContractError, match="has no night"):
        approval.undecided_night(home, "fake-0042")

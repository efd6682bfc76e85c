"""The flows around a rollback and after a bad night: states, retries, and runs that Prefect believes to be alive."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import reconcile as reconcile_module
from flows import rollback as rollback_module
from flows.deployments import Chain, deployments_of
from flows.reconcile import ReconcileRequest, reconcile
from flows.rollback import RollbackRequest, rollback
from tasks.reconcile import Reconciled
from tasks.registry_errors import RollbackRefused, TrackingUnavailable
from tasks.rollback import Rollback


class Told(list):
    def __call__(self, blocks, subject, body):
        self.append((blocks, subject, body))
        return []


@pytest.fixture(autouse=True)
def told(monkeypatch) -> Told:
    told = Told()
    for module in (rollback_module, reconcile_module):
        monkeypatch.setattr(module, "notify", told)
        monkeypatch.setattr(module, "site_of", Site)
        monkeypatch.setattr(module, "check_existing_tracking", lambda uri, seconds: None)
    monkeypatch.setattr(
        rollback_module, "rollback_task", rollback_module.rollback_task.with_options(retry_delay_seconds=0)
    )
    return told


class Site:
    """As much of a site as the flows touch themselves."""

    class config:
        reach_timeout_seconds = 1.0

    tracking_uri = "sqlite://"
    model = "team-policy"

    def __init__(self, home: Path, chain: str | None, model: str | None) -> None:
        self.home = home


def roll_back(**request):
    return rollback(
        RollbackRequest(home="/h", why="too curt", notify=("slack-webhook/ops",), **request), return_state=True
    )


def test_a_rollback_is_done_and_told(monkeypatch, told) -> None:
    asked = []

    def take_down(site, **how):
        asked.append(how)
        return Rollback(True, "4", "3", "version 4 was rolled back to version 3: too curt")

    monkeypatch.setattr(rollback_module, "take_down", take_down)
    state = roll_back(away_from="4", by="automation")
    assert (state.name, state.message) == ("Completed", "version 4 was rolled back to version 3: too curt")
    assert asked == [{"why": "too curt", "to": None, "away_from": "4", "by": "automation"}]
    assert told == [(("slack-webhook/ops",), "Nightjar: team-policy was rolled back", state.message)]


def test_a_person_who_names_nobody_is_not_taken_for_the_automation(monkeypatch) -> None:
    """The parameters are those of the deployment's own form."""
    asked = []

    def take_down(site, **how):
        asked.append(how["by"])
        return Rollback(True, "4", "3", "done")

    monkeypatch.setattr(rollback_module, "take_down", take_down)
    chain = Chain("team", "team-policy", config="/c.yaml", home="/h")
    (form,) = (one.parameters["request"] for one in deployments_of(chain) if one.flow == "rollback")
    assert rollback(RollbackRequest.model_validate(form), return_state=True).is_completed()
    assert asked == ["somebody by the form"]


def test_one_that_was_done_before_is_unchanged_and_not_told(monkeypatch, told) -> None:
    done = Rollback(False, None, "3", "version 4 is not champion (version 3 is): nothing to do")
    monkeypatch.setattr(rollback_module, "take_down", lambda site, **how: done)
    state = roll_back(away_from="4")
    assert (state.name, state.is_completed(), told) == ("Unchanged", True, [])


def test_one_that_is_refused_fails_without_a_retry(monkeypatch, told) -> None:
    calls = []

    def refuse(site, **how):
        calls.append(how)
        raise RollbackRefused("no earlier champion is known, so version 1 stays")

    monkeypatch.setattr(rollback_module, "take_down", refuse)
    state = roll_back()
    assert state.is_failed()
    assert "version 1 stays" in state.message
    assert len(calls) == 1
    assert "the champion stays" in told[0][1]


def test_a_registry_that_is_away_for_a_moment_is_waited_for(monkeypatch) -> None:
    answers = [TrackingUnavailable("away"), TrackingUnavailable("away"), None]

    def take_down(site, **how):
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return Rollback(True, "4", "3", "done")

    monkeypatch.setattr(rollback_module, "take_down", take_down)
    assert roll_back().is_completed()
    assert answers == []


@pytest.mark.parametrize("wrong", [{"why": ""}, {"why": "x", "notify": ("no block",)}, {"why": "x", "version": "3"}])
def test_a_wrong_request_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="RollbackRequest"):
        RollbackRequest(home="/h", **wrong)


def put_in_order(monkeypatch, done: Reconciled | Exception, **request):
    def task(site):
        if isinstance(done, Exception):
            raise done
        return done

    monkeypatch.setattr(reconcile_module, "reconcile_task", task)
    return reconcile(ReconcileRequest(home="/h", **request), return_state=True)


def test_the_schedule_is_silent_when_all_is_well(monkeypatch, told) -> None:
    state = put_in_order(monkeypatch, Reconciled())
    assert (state.is_completed(), told) == (True, [])
    assert "nothing to do" in state.message


def test_a_promotion_at_work_calls_nobody(monkeypatch, told) -> None:
    """Its download and its answers may take longer than the hour has minutes left."""
    busy = Reconciled(busy=["reconcile cannot start: policy.lock is held by promotion of version 7 (pid 8 on here)"])
    state = put_in_order(monkeypatch, busy)
    assert (state.is_completed(), told) == (True, [])
    assert "promotion of version 7" in state.message
    put_in_order(monkeypatch, busy, occasion="night x ended Crashed")
    assert [subject for _, subject, _ in told] == ["Nightjar: /h is in order"]
    assert "promotion of version 7" in told[0][2]


def test_what_was_done_and_why_is_told(monkeypatch, told) -> None:
    done = Reconciled(settled=["promotion of version 4 was reverted"], closed_runs=["abc"])
    state = put_in_order(monkeypatch, done, occasion="night x ended Crashed")
    assert state.is_completed()
    ((_, subject, body),) = told
    assert subject == "Nightjar: /h is in order"
    assert body.splitlines() == [
        "night x ended Crashed", "promotion of version 4 was reverted",
        "MLflow run abc of a dead process was ended as KILLED",
    ]  # fmt: skip


def test_a_bad_night_is_told_even_if_it_left_nothing_open(monkeypatch, told) -> None:
    assert put_in_order(monkeypatch, Reconciled(), occasion="night x ended Rejected: too long").is_completed()
    assert told[0][2] == "night x ended Rejected: too long"


@pytest.mark.parametrize("done", [Reconciled(problems=["the journal is torn"]), TrackingUnavailable("MLflow is away")])
def test_what_needs_a_person_fails(monkeypatch, told, done) -> None:
    state = put_in_order(monkeypatch, done)
    assert state.is_failed()
    assert told[0][1] == "Nightjar: /h needs a person"

"""Runs of the train deployment on a real server: one key is one run, and a lost one is called crashed."""

from __future__ import annotations

import time
import uuid

import pytest
from prefect import get_client
from prefect.states import Completed

from flows.child_runs import ChildRuns
from flows.deploy import deploy
from flows.deployments import Chain
from training.errors import StageError


@pytest.fixture(scope="module")
def deployed() -> None:
    deploy(Chain("team", "team-policy", config="/c.yaml", home="/h"))


def request() -> dict:
    return {"request": {"directory": "/h/runs/team-0001/ppo"}}


def test_one_key_is_one_run_and_an_ended_one_is_not_used_again(deployed) -> None:
    runs = ChildRuns("train/team", f"nightjar-stage-{uuid.uuid4().hex}")
    first = runs.start(request(), key="a-0")
    assert runs.start(request(), key="a-0") == first
    assert runs.next_number() == 0, "who asks now shares it"
    seen = runs.look(first)
    assert (seen.running, seen.ended, seen.words) == (False, None, "Scheduled")
    runs.cancel(first)
    seen = runs.look(first)
    assert seen.ended is not None
    assert seen.ended.is_cancelled()
    assert runs.next_number() == 1
    assert runs.start(request(), key="a-1") != first


def test_runs_that_somebody_deletes_are_neither_waited_for_nor_found_again(deployed) -> None:
    runs = ChildRuns("train/team", f"nightjar-stage-{uuid.uuid4().hex}")
    name = uuid.uuid4().hex
    assert runs.next_number() == 0
    first, second, third = (runs.start(request(), key=f"{name}-{number}") for number in range(3))
    with get_client(sync_client=True) as client:
        for run_id in (first, second):
            client.set_flow_run_state(run_id, Completed(), force=True)
        assert runs.next_number() == 2, "the newest goes on"
        client.set_flow_run_state(third, Completed(), force=True)
        client.delete_flow_run(first)
        assert runs.next_number() == 3, "as if all were there: the keys -1 and -2 are taken"
        client.delete_flow_run(third)
    seen = runs.look(third)
    assert seen.ended is not None
    assert seen.ended.is_crashed()
    assert "deleted" in str(seen.ended.message)


def test_a_run_that_nobody_ends_is_called_crashed(deployed) -> None:
    """Its worker is gone, so Cancelling would last for ever."""
    from prefect.states import Pending, Running

    runs = ChildRuns("train/team", f"nightjar-stage-{uuid.uuid4().hex}")
    run_id = runs.start(request(), key=uuid.uuid4().hex)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Pending(), force=True)
        client.update_flow_run(run_id, infrastructure_pid="host:1")
        client.set_flow_run_state(run_id, Running(), force=True)
    assert runs.look(run_id).running
    started = time.monotonic()
    runs.cancel(run_id, seconds=1.0)
    assert time.monotonic() - started < 20
    ended_as = runs.look(run_id).ended
    assert ended_as is not None
    assert ended_as.is_crashed()


def test_a_missing_deployment_is_named() -> None:
    with pytest.raises(StageError, match=r"no deployment train/nobody.*\n.*nightjar deploy"):
        ChildRuns("train/nobody", "tag").start(request(), key="k")


def test_a_server_that_is_away_is_waited_for_while_a_stage_runs(deployed, monkeypatch) -> None:
    import httpx

    from flows import child_runs

    class Away:
        def __enter__(self):
            raise httpx.ConnectError("refused")

        def __exit__(self, *arguments: object) -> None:
            """Nothing is open."""

    runs = ChildRuns("train/team", "tag")
    monkeypatch.setattr(child_runs, "get_client", lambda sync_client: Away())
    seen = runs.look(uuid.uuid4())
    assert (seen.ended, "does not answer" in seen.words) == (None, True)
    with pytest.raises(StageError, match="does not answer"):
        runs.next_number()
    runs.cancel(uuid.uuid4())

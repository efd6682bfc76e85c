"""Runs that Prefect believes to go on although nobody is at them, on a real server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.settings import PREFECT_API_URL
from prefect.states import AwaitingRetry, Completed, Failed, Paused, Pending, Running, State

from flows import signs_of_life
from flows.deploy import deploy
from flows.deployments import Chain
from flows.lost_runs import close_lost_runs
from flows.reconcile import ReconcileRequest, reconcile
from flows.signs_of_life import shown_at_work
from flows.stack_reconcile import ask_for_reconcile
from tasks.locks import held_lock, holder_of, run_lock_path

WATCHED = ("nightly", "train", "watch", "approve", "rollback", "reconcile")


class Server:
    """A chain of its own, and runs of its deployments that no process has."""

    def __init__(self, client: SyncPrefectClient, home: Path) -> None:
        self.client = client
        self.chain = f"lost-{uuid.uuid4().hex[:8]}"
        deploy(Chain(self.chain, "p", config="/c.yaml", home=str(home)))

    def run_of(self, flow: str, *states: State) -> uuid.UUID:
        deployment = self.client.read_deployment_by_name(f"{flow}/{self.chain}")
        wanted = {"request": {"directory": "/h/runs/n/ppo"}} if flow == "train" else {}
        run = self.client.create_flow_run_from_deployment(deployment.id, parameters=wanted)
        for state in (Pending(), Running(), *states):
            self.client.set_flow_run_state(run.id, state, force=True)
        return run.id

    def taken(self, flow: str) -> uuid.UUID:
        """A run whose worker was killed before the run had a process."""
        deployment = self.client.read_deployment_by_name(f"{flow}/{self.chain}")
        run = self.client.create_flow_run_from_deployment(deployment.id)
        self.client.set_flow_run_state(run.id, Pending(), force=True)
        return run.id

    def deployment(self, flow: str) -> DeploymentFilter:
        found = self.client.read_deployment_by_name(f"{flow}/{self.chain}").id
        return DeploymentFilter(id=DeploymentFilterId(any_=[found]))

    def state_of(self, run: uuid.UUID) -> State:
        state = self.client.read_flow_run(run).state
        assert state is not None
        return state


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with get_client(sync_client=True) as client:
        made = Server(client, tmp_path)
        yield made
        for flow in WATCHED:  # with the automations that they own: other tests count what stands on this server
            client.delete_deployment(client.read_deployment_by_name(f"{flow}/{made.chain}").id)


def test_every_kind_of_run_without_a_process_is_called_crashed(server: Server, tmp_path: Path) -> None:
    """A train run holds the only slot of the GPU pool, and the next night would wait for it for a day."""
    runs = [server.run_of(flow) for flow in WATCHED]
    runs.append(server.run_of("approve", Paused(timeout_seconds=3600)))
    assert close_lost_runs(tmp_path, server.chain) == [], "they may be on their way to their locks"
    told = close_lost_runs(tmp_path, server.chain, 0.0, 0.0)
    assert len(told) == len(runs)
    assert all("called crashed" in sentence for sentence in told)
    assert all(server.state_of(run).is_crashed() for run in runs)
    assert close_lost_runs(tmp_path, server.chain, 0.0, 0.0) == []


def test_runs_that_are_at_work_that_ended_and_of_other_chains_are_left_alone(server: Server, tmp_path: Path) -> None:
    at_work, lost, done = server.run_of("train"), server.run_of("train"), server.run_of("watch", Completed())
    with held_lock(run_lock_path(tmp_path, str(at_work)), "a stage"):
        assert close_lost_runs(tmp_path, "somebody-else", 0.0, 0.0) == []
        (told,) = close_lost_runs(tmp_path, server.chain, 0.0, 0.0)
    assert server.client.read_flow_run(lost).name in told
    assert [server.state_of(run).is_running() for run in (at_work, lost)] == [True, False]
    assert server.state_of(done).is_completed()


def test_a_run_that_was_taken_and_never_began_is_called_crashed_after_an_hour(server: Server, tmp_path: Path) -> None:
    taken = server.taken("nightly")
    assert close_lost_runs(tmp_path, server.chain, 0.0, 0.0) == [], "an image may be on its way"
    with held_lock(run_lock_path(tmp_path, str(taken)), "just begun"):
        assert close_lost_runs(tmp_path, server.chain, 0.0, 0.0, 0.0) == []
    (told,) = close_lost_runs(tmp_path, server.chain, 0.0, 0.0, 0.0)
    assert server.client.read_flow_run(taken).name in told
    assert server.state_of(taken).is_crashed()


def test_a_run_that_was_repeated_has_as_long_to_come_to_its_lock_as_any(server: Server, tmp_path: Path) -> None:
    run = server.run_of("nightly")
    first = server.client.read_flow_run(run).start_time
    time.sleep(6.0)
    for state in (Failed(), AwaitingRetry(), Pending(), Running()):
        server.client.set_flow_run_state(run, state, force=True)
    assert server.client.read_flow_run(run).start_time == first, "Prefect keeps the first start"
    assert close_lost_runs(tmp_path, server.chain, starting_seconds=6.0, ending_seconds=0.0) == []
    assert server.state_of(run).is_running()


def test_a_run_whose_lock_is_there_and_free_is_not_waited_for(server: Server, tmp_path: Path) -> None:
    killed, on_its_way = server.run_of("train"), server.run_of("train")
    lock = run_lock_path(tmp_path, str(killed))
    lock.parent.mkdir(parents=True)
    lock.touch()
    (told,) = close_lost_runs(tmp_path, server.chain, ending_seconds=0.0)
    assert server.client.read_flow_run(killed).name in told
    assert [server.state_of(run).is_running() for run in (killed, on_its_way)] == [False, True]


def test_runs_of_before_the_workers_are_not_waited_for(server: Server, tmp_path: Path) -> None:
    before = [server.run_of("train"), server.taken("nightly")]
    since = datetime.now(UTC)
    later = server.run_of("watch")
    told = close_lost_runs(tmp_path, server.chain, ending_seconds=0.0, workers_since=since)
    assert len(told) == 2
    assert all(server.state_of(run).is_crashed() for run in before)
    assert server.state_of(later).is_running(), "on its way to its lock"


def test_a_stack_that_is_up_again_asks_every_chain(server: Server) -> None:
    since = datetime.now(UTC)
    assert server.chain in ask_for_reconcile(str(PREFECT_API_URL.value()), since)
    (run,) = server.client.read_flow_runs(deployment_filter=server.deployment("reconcile"))
    asked = ReconcileRequest.model_validate(run.parameters["request"])
    assert (asked.workers_since, asked.chain) == (since, server.chain)
    assert ask_for_reconcile("http://127.0.0.1:9/api", since) == []


def test_reconcile_closes_them_and_not_itself(server: Server, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(close_lost_runs, "__defaults__", (0.0, 0.0, 3600.0, None))
    lost = server.run_of("watch")
    request = ReconcileRequest(home=str(tmp_path), chain=server.chain, deployment=f"nightly/{server.chain}")
    state = reconcile(request, return_state=True)
    assert state.is_completed(), "that this home has seen no night is nothing that a person must mend"
    assert "called crashed" in str(state.message)
    assert "nothing to do yet" in str(state.message)
    assert server.state_of(lost).is_crashed()


def test_a_run_shows_itself_as_long_as_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "flow_run", type("Run", (), {"id": "7"}))
    file = run_lock_path(tmp_path, "7")
    with shown_at_work(tmp_path):
        assert holder_of(file) is not None
    assert not file.exists()
    with shown_at_work(tmp_path / "no-such-home"):
        assert not (tmp_path / "no-such-home").exists()

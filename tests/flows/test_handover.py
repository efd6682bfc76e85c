"""A stage on another pool: what the night does for each way a run can go, and runs on a real server."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from configs.schema.runtime import RuntimeConfig
from flows import handover as handover_module
from flows.child_runs import Child
from flows.handover import DEPLOYMENT, run_where_it_belongs
from flows.signs_of_life import Handover
from flows.train import TrainRequest, train
from tasks import launch_plan
from tasks.launch_plan import LaunchPlan
from tasks.progress import Silent, listening
from training.contract import StageSpec, read_spec
from training.errors import StageError

PLAN = LaunchPlan(retries=1, lease=0.2, timeout=30.0, threads=1)
NOT_TAKEN = Child(running=False, ended=None, words="Late")
AT_WORK = Child(running=True, ended=None, words="Running")


def ended(state: State) -> Child:
    return Child(running=False, ended=state, words=state.name or "")


@dataclass
class Pool:
    """Stands for another pool: `script` says what each look at the newest run sees; a callable does its work first."""

    script: list[list[Child | Callable[[Path, Path], Child]]]
    deployment: str = "train/team"
    tag: str = ""
    started: list[tuple[dict, str]] = field(default_factory=list)
    cancelled: list[uuid.UUID] = field(default_factory=list)
    looks: list = field(default_factory=list)
    deleted: int = 0

    def __call__(self, deployment: str, tag: str) -> Pool:
        self.tag = tag
        return self

    def next_number(self) -> int:
        return len(self.started) - self.deleted

    def start(self, parameters: dict, key: str) -> uuid.UUID:
        self.looks = self.script[len(self.started)]
        self.started.append((parameters["request"], key))
        return uuid.uuid4()

    def look(self, run_id: uuid.UUID) -> Child:
        seen = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if callable(seen):
            request = self.started[-1][0]
            return seen(Path(request["directory"]), Path(request["handover"]))
        if isinstance(seen, Child) and seen is INTERRUPT:
            raise KeyboardInterrupt
        return seen

    def cancel(self, run_id: uuid.UUID) -> None:
        self.cancelled.append(run_id)


INTERRUPT = Child(running=True, ended=None, words="Ctrl-C")


class Told(Silent):
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.ended: list[str] = []

    def stage_event(self, stage, kind, fields):
        if kind != "round":  # the small stage's own; what is asked here is what the handing over tells
            self.events.append((kind, str(fields.get("message") or fields.get("how"))))

    def stage_ended(self, stage, how, seconds):
        self.ended.append(how)


@pytest.fixture(autouse=True)
def quick(monkeypatch, fake_stages) -> None:
    monkeypatch.setattr(handover_module, "_POLL_SECONDS", 0.02)
    monkeypatch.setenv(DEPLOYMENT, "train/team")


@pytest.fixture
def spec(tmp_path: Path) -> StageSpec:
    return StageSpec("ppo", "fake-0001", str(tmp_path / "home"), 7, config={}, code_version=uuid.uuid4().hex)


def run(spec: StageSpec, monkeypatch, pool: Pool, plan: LaunchPlan = PLAN):
    monkeypatch.setattr(handover_module, "ChildRuns", pool)
    directory = Path(spec.home) / "runs/fake-0001" / spec.stage
    with listening(Told()) as told:
        try:
            return run_where_it_belongs(spec, directory, plan, RuntimeConfig(retries=plan.retries)), told
        except BaseException as error:
            error.told = told
            raise


def does_the_work(directory: Path, handover: Path) -> Child:
    """What the train flow does, in this process: the spec comes from the handover folder."""
    from tasks.launch import run_stage

    with listening(Silent()):
        run_stage(read_spec(handover), directory, PLAN)
    return ended(Completed())


def test_done_there_is_done(spec, monkeypatch) -> None:
    pool = Pool([[NOT_TAKEN, AT_WORK, does_the_work]])
    done, told = run(spec, monkeypatch, pool)
    assert done.result.output("out").size > 0
    assert (done.reused, done.attempts, pool.cancelled, told.ended) == (False, 1, [], ["done"])
    ((request, key),) = pool.started
    assert TrainRequest.model_validate(request).runtime.retries == 1
    assert key.endswith("-0")
    assert not Path(request["handover"]).exists(), "nothing is left of a stage that is done"

    again, told = run(spec, monkeypatch, pool)
    assert (again.reused, len(pool.started), told.ended) == (True, 1, ["reused"]), "a finished stage starts no run"


def test_a_crashed_run_is_tried_again_under_a_new_key(spec, monkeypatch) -> None:
    pool = Pool([[AT_WORK, ended(Crashed(message="exit code 137"))], [does_the_work]])
    done, told = run(spec, monkeypatch, pool)
    assert done.attempts == 2
    keys = [key for _, key in pool.started]
    assert [key[-2:] for key in keys] == ["-0", "-1"]
    assert keys[0][:-2] == keys[1][:-2], "only the number is another one"
    assert told.events == [("died", "died on its pool (exit code 137)")]


def test_a_run_that_was_deleted_is_tried_again_under_a_new_number(spec, monkeypatch) -> None:
    """Its number is free on the server, while its process may still show life in the folder of that number."""
    pool = Pool([[AT_WORK, ended(Crashed(message="somebody has deleted its run in Prefect"))], [does_the_work]])
    pool.deleted = 1
    done, told = run(spec, monkeypatch, pool)
    assert (done.attempts, [key[-2:] for _, key in pool.started]) == (2, ["-0", "-1"])
    assert "somebody has deleted its run" in told.events[0][1]


def test_a_run_is_shared_within_a_home_and_a_deployment_only(tmp_path, monkeypatch) -> None:
    """Prefect knows one key once in all deployments of the flow, and a home's night sees no life on another's disk."""

    def asked(home: str, deployment: str) -> tuple[str, str, str]:
        monkeypatch.setenv(DEPLOYMENT, deployment)
        pool = Pool([[does_the_work]])
        run(StageSpec("ppo", "fake-0001", str(tmp_path / home), 7, config={}, code_version="c"), monkeypatch, pool)
        ((request, key),) = pool.started
        shutil.rmtree(tmp_path / home)
        return pool.tag, key, Path(request["handover"]).name

    first = asked("a", "train/team")
    assert asked("a", "train/team") == first
    for other in (asked("b", "train/team"), asked("a", "train/other")):
        assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))


def test_as_often_as_the_plan_allows(spec, monkeypatch) -> None:
    pool = Pool([[ended(Crashed(message="exit code 137"))]] * 5)
    with pytest.raises(StageError, match=r"ppo died on its pool \(exit code 137\), 2 time") as caught:
        run(spec, monkeypatch, pool)
    assert len(pool.started) == 2
    assert caught.value.told.ended == ["failed"]


def test_a_failed_run_is_told_in_its_own_words_and_not_repeated(spec, monkeypatch) -> None:
    pool = Pool([[ended(Failed(message="stage ppo: row 7 of pairs.jsonl has no chosen answer"))]])
    with pytest.raises(StageError, match=r"^stage ppo: row 7 of pairs"):
        run(spec, monkeypatch, pool)
    assert len(pool.started) == 1


def test_a_cancelled_run_ends_the_stage(spec, monkeypatch) -> None:
    with pytest.raises(StageError, match="cancelled on its pool"):
        run(spec, monkeypatch, Pool([[ended(Cancelled())]]))


def test_a_state_without_a_result_is_no_success(spec, monkeypatch) -> None:
    with pytest.raises(StageError, match="holds no valid result"):
        run(spec, monkeypatch, Pool([[ended(Completed())]]))


def test_a_result_counts_whatever_the_state(spec, monkeypatch) -> None:
    def works_and_crashes(directory: Path, handover: Path) -> Child:
        does_the_work(directory, handover)
        return ended(Crashed(message="the worker was killed while it reported"))

    done, _ = run(spec, monkeypatch, Pool([[works_and_crashes]]))
    assert done.attempts == 1


def test_a_run_without_signs_of_life_is_cancelled_and_tried_again(spec, monkeypatch) -> None:
    """Its worker was killed: Prefect says Running for ever."""
    pool = Pool([[AT_WORK], [does_the_work]])
    done, told = run(spec, monkeypatch, pool)
    assert (done.attempts, len(pool.cancelled)) == (2, 1)
    assert "shows no life" in told.events[0][1]


def test_signs_of_life_are_waited_for(spec, monkeypatch) -> None:
    def shows_life(directory: Path, handover: Path) -> Child:
        (Handover(handover).run / "lease").touch()
        return AT_WORK

    pool = Pool([[*[shows_life] * 60, does_the_work]])
    done, told = run(spec, monkeypatch, pool)
    assert (done.attempts, told.events) == (1, [])


def test_a_run_that_waited_long_for_its_slot_has_not_fallen_silent(spec, monkeypatch) -> None:
    def waits_in_line(directory: Path, handover: Path) -> Child:
        time.sleep(4 * PLAN.lease)
        return NOT_TAKEN

    pool = Pool([[waits_in_line, AT_WORK, does_the_work]])
    done, told = run(spec, monkeypatch, pool)
    assert (done.attempts, told.events, pool.cancelled) == (1, [], [])


def test_the_wait_is_bounded(spec, monkeypatch) -> None:
    pool = Pool([[NOT_TAKEN]])
    with pytest.raises(StageError, match=r"not done within .*train/team was Late"):
        run(spec, monkeypatch, pool, LaunchPlan(retries=0, timeout=0.3, lease=0.2))
    assert len(pool.cancelled) == 1


def test_nobody_takes_it_is_said_once(spec, monkeypatch) -> None:
    monkeypatch.setattr(handover_module, "_UNTAKEN_SECONDS", 0.05)
    pool = Pool([[*[NOT_TAKEN] * 12, does_the_work]])
    _, told = run(spec, monkeypatch, pool)
    assert [kind for kind, _ in told.events] == ["waiting"]
    assert "prefect worker start --pool gpu" in told.events[0][1]


def test_an_interrupt_is_passed_on(spec, monkeypatch) -> None:
    pool = Pool([[AT_WORK, INTERRUPT]])
    with pytest.raises(KeyboardInterrupt):
        run(spec, monkeypatch, pool)
    assert len(pool.cancelled) == 1
    assert not list((Path(spec.home) / "handover").glob("*/night/lease")), "the run sees that its night is gone"


@pytest.mark.parametrize(("stage", "deployment"), [("validate", "train/team"), ("ppo", "")])
def test_light_stages_and_nights_without_a_pool_stay_here(spec, monkeypatch, stage: str, deployment: str) -> None:
    monkeypatch.setenv(DEPLOYMENT, deployment)
    pool = Pool([])
    here = StageSpec(stage, spec.night, spec.home, 7, config={}, code_version=spec.code_version)
    done, _ = run(here, monkeypatch, pool)
    assert not done.reused
    assert pool.started == []


def test_the_train_flow_runs_a_directory_and_the_spec_that_was_handed_over(spec, tmp_path) -> None:
    handover = Handover(Path(spec.home) / "handover/x")
    handover.prepare()
    from tasks.lease import renewed_lease
    from training.contract import valid_result, write_spec

    write_spec(handover.folder, spec)
    directory = Path(spec.home) / "runs/fake-0001/ppo"
    request = TrainRequest(directory=str(directory), handover=str(handover.folder), runtime=RuntimeConfig(threads=1))
    with renewed_lease(handover.night, 60):
        state = train(request, return_state=True)
    assert state.is_completed(), state.message
    assert valid_result(directory, spec.key) is not None
    by_hand = train(TrainRequest(directory=str(directory)), return_state=True)
    assert "was there already" in by_hand.message
    shutil.rmtree(directory)
    gone = train(TrainRequest(directory=str(directory)), return_state=True)
    assert gone.is_failed()
    assert "spec.json: missing" in gone.message


def test_the_train_flow_tells_the_stage_s_own_words(spec, monkeypatch) -> None:
    from training.contract import write_spec

    monkeypatch.setenv("NIGHTJAR_FAKE", "ppo=user_error")
    directory = Path(spec.home) / "runs/fake-0001/ppo"
    write_spec(directory, spec)
    state = train(TrainRequest(directory=str(directory), runtime=RuntimeConfig(threads=1)), return_state=True)
    assert state.is_failed()
    assert state.message.startswith("stage ppo: row 7 of pairs.jsonl has no chosen answer")
    assert launch_plan.MODULES["ppo"] == "nightjar_fakes"

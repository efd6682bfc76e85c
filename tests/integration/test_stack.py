"""Everything for real: the native stack, `nightjar deploy`, nights on two pools, a breach, and a rollback by itself.

Nothing is replaced by a stand-in. The tests tell one story, in order; each goes on from what the one before has left.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import psutil
import pytest

from flows.stack import read_state
from tasks.journal import Journal
from tests.faults.soundness import assert_sound
from tests.integration.stack_at_hand import CONFIG, MODEL, Stack, marked, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]
HANDED_OVER = {"sft", "annotate", "ppo", "evaluate"}


def test_the_stack_is_healthy_and_on_loopback_alone(stack: Stack) -> None:
    assert stack.shell("flows.stack", "status").count(" healthy") == 5
    assert "running already" in stack.shell("flows.stack", "up")
    pids = {int(file.read_text()) for file in (stack.home / "stack").glob("*.pid")}
    family = {
        process for pid in pids for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    }
    listening = {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    password = (stack.home / "stack/postgres.password").read_text()
    told = "".join(file.read_text(errors="replace") for file in (stack.home / "stack/logs").glob("*.log"))
    assert password not in told + "".join(" ".join(process.cmdline()) for process in family)


def test_deploying_twice_doubles_nothing(stack: Stack) -> None:
    choices = ("--cron", "off", "--watch-cron", "off", "--approval-hours", "1")
    stack.shell("flows.cli", "deploy", str(CONFIG), *choices)
    before = len(stack.prefect("deployments/filter")), len(stack.prefect("automations/filter"))
    told = stack.shell("flows.cli", "deploy", str(CONFIG), *choices)
    assert "was created" not in told
    assert (len(stack.prefect("deployments/filter")), len(stack.prefect("automations/filter"))) == before == (6, 3)
    (gpu,) = stack.prefect("work_pools/filter", {"work_pools": {"name": {"any_": ["gpu"]}}})
    assert gpu["concurrency_limit"] == 1, "its worker has made it, without one"


def test_a_night_on_two_pools_promotes(stack: Stack) -> None:
    with stack.timed("first night"):
        run = stack.wait(stack.start("nightly/short"))
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert (stack.alias("champion"), stack.alias("previous")) == ("1", None)
    children = stack.runs("train")
    assert {child["name"] for child in children} == {f"short-0001 {stage}" for stage in HANDED_OVER}
    assert {child["state_type"] for child in children} == {"COMPLETED"}
    assert {child["work_pool_name"] for child in children} == {"gpu"}
    assert run["work_pool_name"] == "cpu"
    assert list((stack.home / "handover").iterdir()) == [], "nothing is left of what was handed over"


@pytest.mark.usefixtures("at_its_servers")
def test_a_second_night_outlives_its_database_and_its_gpu_worker(stack: Stack) -> None:
    """Both are killed. Prefect goes on saying Running of the run that died with its worker; the night sees no sign of
    life, and starts the stage on another run."""
    with stack.timed("second night, with both faults"):
        run_id = stack.start("nightly/short")
        at_work(stack, "short-0002", "annotate")
        kill(stack, "postgres")
        lost = at_work(stack, "short-0002", "ppo")
        kill(stack, "worker-gpu")
        run = stack.wait(run_id)
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert (stack.alias("champion"), stack.alias("previous")) == ("2", "1")
    ends = {child["id"]: child["state_type"] for child in stack.runs("train") if child["name"] == "short-0002 ppo"}
    assert ends.pop(lost["id"]) in ("CANCELLED", "CRASHED")
    assert list(ends.values()) == ["COMPLETED"]
    assert stack.shell("flows.stack", "status").count(" healthy") == 5
    assert_sound(stack.home, chain="short")


def test_a_breach_rolls_back_without_anyone_s_hand(stack: Stack) -> None:
    assert stack.runs("rollback") == []
    with stack.timed("watch"):
        watch = stack.wait(stack.start("watch/short"))
    assert watch["state_name"] == "Breached", watch["state"]["message"]
    with stack.timed("breach to rollback"):
        (run,) = until(lambda: stack.runs("rollback"))
        rollback = stack.wait(run["id"])
    assert rollback["state_name"] == "Completed", rollback["state"]["message"]
    assert rollback["parameters"]["request"]["away_from"] == "2"
    assert (stack.alias("champion"), stack.alias("previous")) == ("1", None)
    last = Journal(stack.home).last_closed(MODEL)
    assert last is not None
    assert (last.event, last.taken_down, last.restored, last.by) == ("rolled_back", "2", "1", "automation")
    assert "reward is" in str(last.why)


def test_the_same_event_again_takes_nobody_else_down(stack: Stack) -> None:
    payload = {"why": "late", "version": "2", "home": str(stack.home), "chain": "short", "model": MODEL}
    emit = (
        "from prefect.events import emit_event; "
        f"emit_event('nightjar.champion.breached', resource={{'prefect.resource.id': 'nightjar.model.{MODEL}'}}, "
        f"payload={payload!r})"
    )
    subprocess.run([sys.executable, "-c", emit], env=stack.environment, check=True, timeout=600)
    until(lambda: len(stack.runs("rollback")) == 2)
    newest = max(stack.runs("rollback"), key=lambda run: run["created"])
    assert stack.wait(newest["id"])["state_name"] == "Unchanged"
    assert stack.alias("champion") == "1"


def test_cancelling_a_night_cancels_its_stage_and_leaves_no_process(stack: Stack) -> None:
    run_id = stack.start("nightly/short")
    child = at_work(stack, "short-0003", "annotate")
    stack.prefect(f"flow_runs/{run_id}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    assert stack.wait(run_id)["state_type"] == "CANCELLED"
    assert stack.wait(child["id"])["state_type"] == "CANCELLED"
    until(lambda: not marked(stack.home / "runs") and not flow_runs(stack))
    assert stack.alias("champion") == "1"


@pytest.mark.usefixtures("at_its_servers")
def test_the_cancelled_night_goes_on_with_the_next_start(stack: Stack) -> None:
    with stack.timed("the cancelled night, gone on with"):
        run = stack.wait(stack.start("nightly/short"))
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert not (stack.home / "runs/short-0004").exists(), "it is the same night"
    assert (stack.alias("champion"), stack.alias("previous")) == ("3", "1")
    assert_sound(stack.home, chain="short")


def test_an_undecided_night_asks_a_person_by_itself(stack: Stack) -> None:
    """The run itself is made up; what follows is the server's own doing."""
    (nightly,) = stack.prefect("deployments/filter", {"flows": {"name": {"any_": ["nightly"]}}})
    later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2099-01-01T00:00:00Z"}}
    run = stack.prefect(f"deployments/{nightly['id']}/create_flow_run", {"state": later})
    undecided = {"type": "FAILED", "name": "Undecided", "message": "the interval straddles the limit"}
    stack.prefect(f"flow_runs/{run['id']}/set_state", {"state": undecided, "force": True})
    (asking,) = until(lambda: stack.runs("approve"))
    assert asking["parameters"]["request"]["flow_run_id"] == run["id"]
    assert asking["parameters"]["request"]["timeout_hours"] == 1
    done = stack.wait(asking["id"])
    assert done["state_name"] == "Kept", "no night of this home came from that run"


def test_a_bad_end_is_reconciled_by_itself(stack: Stack) -> None:
    """A night that fails is answered by the reconcile deployment."""
    missing = {"config": str(stack.home / "missing.yaml"), "overrides": []}
    run = stack.wait(stack.start("nightly/short", request=missing))
    assert run["state_type"] == "FAILED"

    def answering() -> list[dict[str, Any]]:
        occasions = ((one, one["parameters"]["request"].get("occasion", "")) for one in stack.runs("reconcile"))
        return [one for one, occasion in occasions if "missing.yaml" in occasion]

    (answer,) = until(answering)
    done = stack.wait(answer["id"])
    assert done["state_type"] == "COMPLETED", done["state"]["message"]
    assert run["name"] in done["parameters"]["request"]["occasion"]


def at_work(stack: Stack, night: str, stage: str) -> dict[str, Any]:
    """The run that has this stage's child at work right now."""

    def found() -> list[dict[str, Any]]:
        running = [run for run in stack.runs("train") if run["state_type"] == "RUNNING"]
        has_child = (stack.home / "runs" / night / stage / "lease").exists()
        return [run for run in running if run["name"] == f"{night} {stage}"] if has_child else []

    return until(found, 1800)[0]


def kill(stack: Stack, service: str) -> None:
    """Kill every process of a service and wait until the supervisor has started it again."""
    for process in stack.service(service):
        process.kill()

    def is_back() -> bool:
        state = read_state(stack.home / "stack")["services"][service]
        return bool(state["restarts"] and state["healthy"])

    until(is_back)


def flow_runs(stack: Stack) -> list[str]:
    """Command lines of what the workers have started."""
    workers = [process for name in ("worker-cpu", "worker-gpu") for process in stack.service(name)]
    return [line for line in (json.dumps(process.cmdline()) for process in workers) if "flow-run" in line]

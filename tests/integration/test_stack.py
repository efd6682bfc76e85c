"""Everything for real: the native stack, `nightjar deploy`, nights on two pools, a breach, and a rollback by itself.

PostgreSQL, `prefect server`, `mlflow server` and two process workers on loopback; nothing is replaced by a stand-in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flows.stack_postgres import find_binaries
from tasks.journal import Journal
from tasks.launch_plan import free_port
from tasks.process_tree import MARK

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests/integration/short.yaml"
HANDED_OVER = {"sft", "reward", "distill", "annotate", "ppo", "evaluate"}
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def has_postgres() -> bool:
    try:
        find_binaries()
    except Exception:
        return False
    return True


pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not has_postgres(), reason="no PostgreSQL 14 or newer on this machine"),
]


@dataclass
class Stack:
    """The running stack, and what a person at a shell or in the browser would do with it."""

    home: Path
    environment: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)

    def shell(self, *command: str, seconds: float = 600) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command], env=self.environment, capture_output=True, text=True, cwd=ROOT,
            timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def prefect(self, path: str, content: dict[str, Any] | None = None) -> Any:
        reply = httpx.post(f"{self.environment['PREFECT_API_URL']}/{path}", json=content or {}, timeout=60)
        reply.raise_for_status()
        return reply.json()

    def runs(self, flow: str) -> list[dict[str, Any]]:
        """Newest first, as the flow runs page lists them."""
        wanted = {"flows": {"name": {"any_": [flow]}}, "sort": "START_TIME_DESC", "limit": 100}
        return self.prefect("flow_runs/filter", wanted)

    def start(self, deployment: str, **parameters: Any) -> str:
        """`prefect deployment run`, as the README says it; returns the run's id."""
        before = {run["id"] for run in self.runs(deployment.split("/")[0])}
        given = [part for name, value in parameters.items() for part in ("--param", f"{name}={json.dumps(value)}")]
        self.shell("prefect", "deployment", "run", deployment, *given)
        (new,) = [run["id"] for run in self.runs(deployment.split("/")[0]) if run["id"] not in before]
        return new

    def wait(self, run_id: str, seconds: float = 1500) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            (run,) = self.prefect("flow_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}})
            return run if run["state_type"] in FINAL else None

        return until(ended, seconds)

    def night(self) -> dict[str, Any]:
        started = time.monotonic()
        run = self.wait(self.start("nightly/short"))
        self.seconds[f"night {len(self.seconds)}"] = time.monotonic() - started
        return run

    def alias(self, alias: str) -> str | None:
        """Asked of the MLflow server directly."""
        reply = httpx.get(
            f"{self.environment['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/registered-models/alias",
            params={"name": "short-policy", "alias": alias},
            timeout=60,
        )
        content = reply.json()
        assert "model_version" in content or "not found" in content["message"], content
        return content["model_version"]["version"] if "model_version" in content else None


def until(found: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"it did not come to that in {seconds} s"
        time.sleep(1.0)
    return value


def marked(place: Path) -> list[psutil.Process]:
    """Every process that was started for this place or below it, stage or service."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK, "")
        except (psutil.Error, OSError):
            continue
        if f"{mark}/".startswith(f"{place}/") and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def processes_of_home(home: Path) -> list[str]:
    """Their command lines."""
    return [" ".join(process.cmdline()) for process in marked(home)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    home = Path(tempfile.mkdtemp(prefix="nightjar-integration-"))
    home.chmod(0o711)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    quiet = {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    ports = [part for name in ("prefect", "mlflow", "postgres") for part in (f"--{name}-port", str(free_port()))]
    made = Stack(home, kept | quiet | {"NIGHTJAR_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    started = time.monotonic()
    try:
        made.shell("flows.stack", "up", *ports, seconds=900)
        made.seconds["stack up"] = time.monotonic() - started
        lines = (home / "stack/env").read_text(encoding="utf-8").splitlines()
        made.environment |= dict(line.removeprefix("export ").split("=", 1) for line in lines)
        yield made
    finally:
        stopping = time.monotonic()
        made.shell("flows.stack", "down")
        made.seconds["stack down"] = time.monotonic() - stopping
        left = processes_of_home(home)
        print({name: round(seconds) for name, seconds in made.seconds.items()})  # noqa: T201
        shutil.rmtree(home, ignore_errors=True)
        assert left == []


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


def test_a_night_on_two_pools_promotes(stack: Stack) -> None:
    run = stack.night()
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert (stack.alias("champion"), stack.alias("previous")) == ("1", None)
    children = stack.runs("train")
    assert {child["name"] for child in children} == {f"short-0001 {stage}" for stage in HANDED_OVER}
    assert {child["state_type"] for child in children} == {"COMPLETED"}
    assert {child["work_pool_name"] for child in children} == {"gpu"}
    assert run["work_pool_name"] == "cpu"
    assert list((stack.home / "handover").iterdir()) == [], "nothing is left of what was handed over"


def test_a_second_night_replaces_the_champion(stack: Stack) -> None:
    run = stack.night()
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert (stack.alias("champion"), stack.alias("previous")) == ("2", "1")


def test_a_breach_rolls_back_without_anyone_s_hand(stack: Stack) -> None:
    assert stack.runs("rollback") == []
    started = time.monotonic()
    watch = stack.wait(stack.start("watch/short"))
    assert watch["state_name"] == "Breached", watch["state"]["message"]
    measured = time.monotonic()
    (run,) = until(lambda: stack.runs("rollback"), 120)
    rollback = stack.wait(run["id"], 600)
    stack.seconds |= {"watch": measured - started, "breach to rollback": time.monotonic() - measured}
    assert rollback["state_name"] == "Completed", rollback["state"]["message"]
    assert rollback["parameters"]["request"]["away_from"] == "2"
    assert (stack.alias("champion"), stack.alias("previous")) == ("1", None)
    last = Journal(stack.home).last_closed("short-policy")
    assert last is not None
    assert (last.event, last.taken_down, last.restored, last.by) == ("rolled_back", "2", "1", "automation")
    assert "reward is" in str(last.why)


def test_the_same_event_again_takes_nobody_else_down(stack: Stack) -> None:
    emit = (
        "from prefect.events import emit_event; "
        "emit_event('nightjar.champion.breached', resource={'prefect.resource.id': 'nightjar.model.short-policy'}, "
        f"payload={{'why': 'late', 'version': '2', 'home': {str(stack.home)!r}}})"
    )
    subprocess.run([sys.executable, "-c", emit], env=stack.environment, check=True, timeout=120)
    until(lambda: len(stack.runs("rollback")) == 2, 120)
    newest = max(stack.runs("rollback"), key=lambda run: run["created"])
    assert stack.wait(newest["id"], 600)["state_name"] == "Unchanged"
    assert stack.alias("champion") == "1"


def test_cancelling_a_night_cancels_its_stage_and_leaves_no_process(stack: Stack) -> None:
    run_id = stack.start("nightly/short")
    before = {child["id"] for child in stack.runs("train")}

    def stage_at_work() -> list[dict[str, Any]]:
        children = [child for child in stack.runs("train") if child["id"] not in before]
        busy = any((stack.home / "runs/short-0003").glob("*/lease"))
        return [child for child in children if child["state_type"] == "RUNNING" and busy]

    (child,) = until(stage_at_work, 600)
    stack.prefect(f"flow_runs/{run_id}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    assert stack.wait(run_id, 300)["state_type"] == "CANCELLED"
    assert stack.wait(child["id"], 300)["state_type"] == "CANCELLED"
    until(lambda: not [line for line in processes_of_home(stack.home) if " training " in line or "engine" in line], 60)
    assert stack.alias("champion") == "1"


def test_a_gpu_worker_that_is_killed_with_its_run_costs_the_steps_since_the_checkpoint(stack: Stack) -> None:
    """Prefect goes on saying Running; the night sees no sign of life, and starts the stage on another run."""
    run_id = stack.start("nightly/short")
    (killed,) = until(lambda: [c for c in stack.runs("train") if c["name"].endswith(" ppo") and is_running(c)], 900)
    until((stack.home / "runs/short-0003/ppo/lease").exists, 120)
    for process in marked(stack.home / "stack/services/worker-gpu"):
        process.kill()
    run = stack.wait(run_id)
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert (stack.alias("champion"), stack.alias("previous")) == ("3", "1"), "2 was rolled back"
    seen = {child["name"]: [] for child in stack.runs("train")}
    for child in stack.runs("train"):
        seen[child["name"]].append(child["state_type"])
    assert sorted(seen["short-0003 ppo"])[0] == "CANCELLED" or "CRASHED" in seen["short-0003 ppo"]
    assert seen["short-0003 ppo"].count("COMPLETED") == 1
    assert killed["id"] not in {c["id"] for c in stack.runs("train") if c["state_type"] == "COMPLETED"}
    assert stack.shell("flows.stack", "status").count(" healthy") == 5, "the supervisor has started the worker again"


def is_running(run: dict[str, Any]) -> bool:
    return run["state_type"] == "RUNNING"


def test_an_undecided_night_asks_a_person_by_itself(stack: Stack) -> None:
    """The run itself is made up; what follows is the server's own doing."""
    (nightly,) = stack.prefect("deployments/filter", {"flows": {"name": {"any_": ["nightly"]}}})
    later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2099-01-01T00:00:00Z"}}
    run = stack.prefect(f"deployments/{nightly['id']}/create_flow_run", {"state": later})
    undecided = {"type": "FAILED", "name": "Undecided", "message": "the interval straddles the limit"}
    stack.prefect(f"flow_runs/{run['id']}/set_state", {"state": undecided, "force": True})
    (asking,) = until(lambda: stack.runs("approve"), 120)
    assert asking["parameters"]["request"]["flow_run_id"] == run["id"]
    assert asking["parameters"]["request"]["timeout_hours"] == 1
    done = stack.wait(asking["id"], 300)
    assert done["state_name"] == "Kept", "no night of this home came from that run"


def test_a_bad_end_was_reconciled_by_itself(stack: Stack) -> None:
    """A night that fails is answered by the reconcile deployment."""
    missing = {"config": str(stack.home / "missing.yaml"), "overrides": []}
    run = stack.wait(stack.start("nightly/short", request=missing))
    assert run["state_type"] == "FAILED"

    def answering() -> list[dict[str, Any]]:
        return [one for one in stack.runs("reconcile") if "missing.yaml" in one["parameters"]["request"]["occasion"]]

    (answer,) = until(answering, 120)
    done = stack.wait(answer["id"], 300)
    assert done["state_type"] == "COMPLETED", done["state"]["message"]
    assert run["name"] in done["parameters"]["request"]["occasion"]

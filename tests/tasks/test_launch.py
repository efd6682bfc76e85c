"""The launcher against real child processes that work, die, hang, or complain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tasks import launch_plan
from tasks.launch import last_words, run_stage
from tasks.launch_plan import LaunchPlan
from tasks.process_tree import end_processes, processes_of
from tasks.progress import Silent
from tasks.stages import SHAPES
from training.contract import StageSpec, read_spec, write_spec
from training.errors import StageError

FAKES = Path(__file__).resolve().parents[1] / "flows" / "fakes"
PLAN = LaunchPlan(threads=1, retries=2, timeout=60.0, lease=30.0, retry_pause=0.01)


class Heard(Silent):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[tuple] = []

    def stage_started(self, stage, attempt):
        self.lines.append(("started", stage, attempt))

    def stage_moved(self, stage, step, total, shown, doing=""):
        self.lines.append(("moved", step, total, dict(shown)))

    def stage_event(self, stage, kind, fields):
        self.lines.append(("event", kind))

    def stage_ended(self, stage, how, seconds):
        self.lines.append(("ended", how))


@pytest.fixture(autouse=True)
def fake_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launch_plan.MODULES, "sft", "nightjar_fakes")
    monkeypatch.setenv("PYTHONPATH", str(FAKES))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def spec_in(home: Path, behaviour: str = "ok", seed: int = 0) -> StageSpec:
    return StageSpec("sft", "n1", str(home), seed, config={}, params={"behaviour": behaviour}, code_version="x")


def starts(directory: Path) -> int:
    return len((directory / "starts.jsonl").read_text().splitlines())


def wait_for(path: Path, seconds: float = 30.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path} never came")


def test_runs_and_tells_progress(home: Path) -> None:
    heard = Heard()
    run = run_stage(spec_in(home), home / "runs/n1/sft", PLAN, heard)
    assert run.result.metrics == {"loss": 0.25}
    assert (run.attempts, run.reused) == (1, False)
    assert heard.lines[0] == ("started", "sft", 1)
    assert ("moved", 3, 3, {"loss": pytest.approx(1 / 3)}) in heard.lines
    assert heard.lines[-1] == ("ended", "done")
    first = json.loads((run.directory / "starts.jsonl").read_text())
    assert first["omp"] == "1"


def test_second_call_reuses_and_starts_nothing(home: Path) -> None:
    directory = home / "runs/n1/sft"
    run_stage(spec_in(home), directory, PLAN)
    again = run_stage(spec_in(home), directory, PLAN)
    assert again.reused
    assert starts(directory) == 1


def test_later_night_reuses_by_key_and_a_changed_output_is_not_reused(home: Path) -> None:
    first = run_stage(spec_in(home), home / "runs/n1/sft", PLAN)
    later = run_stage(replace(spec_in(home), night="n2"), home / "runs/n2/sft", PLAN)
    assert later.reused
    assert later.directory.resolve() == first.directory.resolve()
    Path(first.result.output("out").path).write_text("tampered")
    anew = run_stage(replace(spec_in(home), night="n3"), home / "runs/n3/sft", PLAN)
    assert not anew.reused
    assert anew.directory == home / "runs/n3/sft"


def test_killed_child_is_retried_from_its_checkpoint(home: Path) -> None:
    heard = Heard()
    run = run_stage(spec_in(home, "die_at_2"), home / "runs/n1/sft", PLAN, heard)
    assert run.attempts == 2
    assert run.result.facts["resumed_at"] == 2
    assert ("event", "died") in heard.lines


def test_child_that_always_dies_fails_after_the_retries(home: Path) -> None:
    directory = home / "runs/n1/sft"
    with pytest.raises(StageError, match=r"ended by SIGKILL.*3 time\(s\)"):
        run_stage(spec_in(home, "die"), directory, PLAN)
    assert starts(directory) == 3


def test_user_error_is_not_retried_and_keeps_its_words(home: Path) -> None:
    directory = home / "runs/n1/sft"
    with pytest.raises(StageError, match="row 7 of pairs") as caught:
        run_stage(spec_in(home, "user_error"), directory, PLAN)
    assert "what to do: remove it" in str(caught.value)
    assert starts(directory) == 1


def test_crash_reports_its_last_line(home: Path) -> None:
    with pytest.raises(StageError, match=r"exit code 1: RuntimeError: something broke inside"):
        run_stage(spec_in(home, "crash"), home / "runs/n1/sft", replace(PLAN, retries=0))


def test_exit_code_0_without_a_result_is_a_failure(home: Path) -> None:
    with pytest.raises(StageError, match="exit code 0"):
        run_stage(spec_in(home, "exit_0"), home / "runs/n1/sft", replace(PLAN, retries=0))


@pytest.mark.parametrize("behaviour", ["hang", "hang_with_child"])
def test_timeout_ends_the_whole_tree(home: Path, behaviour: str) -> None:
    directory = home / "runs/n1/sft"
    with pytest.raises(StageError, match="took longer"):
        run_stage(spec_in(home, behaviour), directory, replace(PLAN, timeout=4.0))
    assert starts(directory) == 1
    assert processes_of(directory) == []
    if behaviour == "hang_with_child":
        assert not psutil.pid_exists(int((directory / "stray.pid").read_text())) or _is_zombie(directory)


def _is_zombie(directory: Path) -> bool:
    process = psutil.Process(int((directory / "stray.pid").read_text()))
    return process.status() == psutil.STATUS_ZOMBIE


def test_interrupt_ends_the_child(home: Path) -> None:
    directory = home / "runs/n1/sft"

    def interrupt() -> None:
        wait_for(directory / "child.pid")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    heard = Heard()
    with pytest.raises(KeyboardInterrupt):
        run_stage(spec_in(home, "hang"), directory, PLAN, heard)
    thread.join()
    assert heard.lines[-1] == ("ended", "failed")
    assert processes_of(directory) == []


def test_a_child_that_ignores_sigterm_is_killed(home: Path) -> None:
    directory = home / "runs/n1/sft"
    write_spec(directory, spec_in(home, "stubborn"))
    environment = PLAN.environment("sft") | {"NIGHTJAR_STAGE_DIRECTORY": str(directory.resolve())}
    child = subprocess.Popen(PLAN.command("sft", directory), env=environment, stdout=subprocess.DEVNULL)
    wait_for(directory / "child.pid")
    assert end_processes(directory, grace_seconds=0.5) == 1
    assert child.wait(5) == -signal.SIGKILL


def test_child_dies_with_a_killed_parent(home: Path) -> None:
    directory = home / "runs/n1/sft"
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(home), str(directory)])
    child = int(wait_for(directory / "child.pid"))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(directory) == [], f"child {child} outlived its parent"


_PARENT = f"""
import sys
sys.path[:0] = [{str(FAKES.parents[2])!r}]
from pathlib import Path
from tasks import launch_plan
from tasks.launch import run_stage
from training.contract import StageSpec
launch_plan.MODULES["sft"] = "nightjar_fakes"
spec = StageSpec("sft", "n1", sys.argv[1], 0, config={{}}, params={{"behaviour": "hang"}})
run_stage(spec, Path(sys.argv[2]), launch_plan.LaunchPlan(threads=1))
"""


def test_strays_of_a_killed_parent_are_ended_before_a_new_start(home: Path) -> None:
    directory = home / "runs/n1/sft"
    directory.mkdir(parents=True)
    stray = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {"NIGHTJAR_STAGE_DIRECTORY": str(directory.resolve())},
    )
    while [p.pid for p in processes_of(directory)] != [stray.pid]:
        time.sleep(0.05)
    run_stage(spec_in(home), directory, PLAN)
    assert stray.wait(5) == -signal.SIGTERM


def test_directory_of_another_key_is_moved_aside(home: Path) -> None:
    directory = home / "runs/n1/sft"
    run_stage(spec_in(home), directory, PLAN)
    run = run_stage(spec_in(home, seed=1), directory, PLAN)
    assert run.result.facts["resumed_at"] == 0, "checkpoints of another key must not be resumed"
    assert read_spec(directory.with_name("sft.superseded-1")).seed == 0


SERVERS = {"MLFLOW_TRACKING_PASSWORD": "s3cret", "PREFECT_API_KEY": "k"}
CLOUDS = {"AWS_SECRET_ACCESS_KEY": "a", "AZURE_STORAGE_KEY": "b", "GOOGLE_APPLICATION_CREDENTIALS": "/c.json"}


@pytest.mark.parametrize("stage", SHAPES)
def test_only_the_stage_that_reads_the_source_gets_credentials_and_only_of_clouds(stage: str) -> None:
    environment = PLAN.environment(stage, SERVERS | CLOUDS | {"PATH": "/bin"})
    assert not environment.keys() & SERVERS.keys()
    kept = {name: value for name, value in environment.items() if name in CLOUDS}
    assert kept == (CLOUDS if stage == "validate" else {})
    assert environment["PATH"] == "/bin"


def test_torchrun_command_has_a_port_of_its_own() -> None:
    plan = replace(PLAN, nproc_per_node=2)
    commands = [plan.command("sft", Path("d")) for _ in range(2)]
    for command in commands:
        assert command[1:3] == ["-m", "torch.distributed.run"]
        assert "--nproc-per-node=2" in command
    ports = [next(word for word in command if word.startswith("--master-port")) for command in commands]
    assert ports[0] != ports[1]


def test_several_nodes_meet_at_the_configured_rendezvous() -> None:
    command = replace(PLAN, nnodes=2, rdzv_endpoint="node0:29400").command("ppo", Path("d"))
    assert {"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400"} <= set(command)


def test_last_words_reads_only_this_attempt(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    old = "2026-01-01 00:00:00,0 ERROR nightjar: DataError: old words\n"
    log.write_text(old + "2026-01-01 00:00:01,0 INFO x: begins\nTraceback\nValueError: new words\n")
    assert last_words(log, len(old)).text == "ValueError: new words"
    assert last_words(log).is_user_error
    assert last_words(log).text == "old words"

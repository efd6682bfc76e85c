"""A night killed with SIGKILL in any stage continues when the command is repeated, and ends with the same files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from prefect.settings import PREFECT_API_URL

from tasks.night_state import NightBook
from tasks.process_tree import processes_of

ROOT = Path(__file__).resolve().parents[2]
FAKES = Path(__file__).resolve().parent / "fakes"
STAGES = ("validate", "base", "sft", "reward", "distill", "annotate", "ppo", "evaluate")


def environment_of(tiny_model: Path, fake: str, die: str = "") -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(FAKES)]),
        "NIGHTJAR_FAKE": fake,
        "NIGHTJAR_FAKE_DIE": die,
        "NIGHTJAR_FAKE_MODEL": str(tiny_model),
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "OMP_NUM_THREADS": "1",
    }


def run_command(nights, tiny_model: Path, fake: str = "", die: str = "") -> subprocess.CompletedProcess:
    environment = environment_of(tiny_model, fake, die)
    command = [sys.executable, str(FAKES / "fake_cli.py"), "run", str(nights.config_path), "--plain"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def outputs(home: Path) -> dict[str, dict[str, str]]:
    """Stage -> role -> sha256 of what it made, without reports that name places."""
    found = {}
    for file in sorted((home / "runs/fake-0001").glob("*/result.json")):
        result = json.loads(file.read_text())
        skipped = {"report"} if result["stage"] == "validate" else set()
        made = result["outputs"].items()
        found[result["stage"]] = {role: ref["sha256"] for role, ref in made if role not in skipped}
    return found


@pytest.mark.parametrize(
    ("stages", "acts"),
    [
        pytest.param(("validate", "ppo"), (), id="first-and-longest"),
        pytest.param(
            ("base", "sft", "reward", "distill", "annotate", "evaluate"),
            ("register_candidate:before", "register_candidate:after", "promote:before"),
            id="every-other-stage-and-the-registry",
            marks=[pytest.mark.slow, pytest.mark.timeout(1800)],
        ),
    ],
)
def test_killed_and_continued(
    nights, new_home, light_registry, tiny_model, stages: tuple[str, ...], acts: tuple[str, ...]
) -> None:
    """One night, killed again and again. What its promotion leaves behind when it is killed inside: tests/faults."""
    for stage in stages:
        _is_killed(run_command(nights, tiny_model, f"{stage}=kill_parent_at_2"))
        assert processes_of(nights.home / "runs/fake-0001" / stage) == []
        assert NightBook(nights.home).load("fake-0001").status == "running"
    for act in acts:
        _is_killed(run_command(nights, tiny_model, die=act))
        assert NightBook(nights.home).load("fake-0001").status == "running"
    done = run_command(nights, tiny_model)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "goes on where it stopped" in done.stdout
    (night,) = NightBook(nights.home).nights()
    assert (night.version, night.promoted) == ("1", True), "registered once, however often it was killed there"
    for stage in STAGES:
        result = json.loads((nights.home / f"runs/fake-0001/{stage}/result.json").read_text())
        assert result["facts"]["resumed_at"] == (2 if stage in stages else 0), stage
        assert nights.starts(stage) == (2 if stage in stages else 1), f"{stage} was trained twice"

    undisturbed = new_home()
    assert undisturbed.run().is_completed()
    assert outputs(nights.home) == outputs(undisturbed.home)
    runs = _mlflow_states(nights)
    assert set(runs) == {"FINISHED"}, "no run of a killed process is left open"


def _is_killed(process: subprocess.CompletedProcess) -> None:
    assert process.returncode == -signal.SIGKILL, process.stdout[-2000:] + process.stderr[-2000:]


def _mlflow_states(nights) -> list[str]:
    from tasks.last_config import site_of

    client = site_of(nights.home).registry.client
    found = client.search_runs([client.get_experiment_by_name("nightjar").experiment_id])
    return [run.info.status for run in found]


@pytest.mark.parametrize("embedded", [False, True], ids=["with-server", "embedded-and-whole-group"])
def test_interrupt_leaves_no_process_and_a_night_to_continue(nights, tiny_model, embedded: bool) -> None:
    """Ctrl-C in a terminal reaches the whole process group, Prefect's temporary server with it."""
    environment = environment_of(tiny_model, "sft=hang")
    if embedded:
        environment.pop("PREFECT_API_URL")
    command = [sys.executable, str(FAKES / "fake_cli.py"), "run", str(nights.config_path), "--plain"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    directory = nights.home / "runs/fake-0001/sft"
    _wait_for(directory / "child.pid", process)
    if embedded:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Repeat the command to go on" in told
    assert "Traceback" not in told
    assert processes_of(directory) == []
    assert _living_in_session(process.pid) == [], "the temporary server is gone as well"
    assert NightBook(nights.home).load("fake-0001").status == "running"


def _living_in_session(session: int) -> list[str]:
    def is_living(process: psutil.Process) -> bool:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE

    return [" ".join(process.cmdline()) for process in psutil.process_iter() if is_living(process)]


def _wait_for(file: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if file.exists():
            return
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        time.sleep(0.1)
    raise AssertionError(f"{file} never came")

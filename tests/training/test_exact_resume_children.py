"""Exact resume through the real command line: `python -m training STAGE DIR`, SIGKILL from outside at a seeded step.

Slow: every child pays for its imports. test_exact_resume.py tries many more deaths in forked children.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.same_run import assert_same_run
from tests.training.stages import DISTILL, PPO, REWARD, SFT, start_child, write_stage
from training.contract import METRICS, RESULT
from training.recorder import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECTIONS = {
    "sft": {"sft": SFT.model_copy(update={"epochs": 6.0, "eval_every": 4, "checkpoint_every": 3})},
    "reward": {"reward": REWARD.model_copy(update={"epochs": 6.0, "eval_every": 4, "checkpoint_every": 3})},
    "distill": {"distill": DISTILL.model_copy(update={"epochs": 6.0, "eval_every": 4, "checkpoint_every": 3})},
    "ppo": {"ppo": PPO.model_copy(update={"rounds": 4, "checkpoint_every": 3})},
}
STEPS = {"sft": 18, "reward": 18, "distill": 20, "ppo": 16}
Make = Callable[[str, str], Path]


@pytest.fixture
def make(tmp_path, night, snapshot, base_folder, reference_folder, teacher_folder, ppo_inputs) -> Make:
    inputs = {
        "sft": {"snapshot": snapshot, "base": base_folder},
        "reward": {"snapshot": snapshot, "reference": reference_folder},
        "distill": {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder},
        "ppo": ppo_inputs,
    }

    def write(stage: str, name: str) -> Path:
        params = {}
        if stage == "ppo":
            params = {"store": str(shutil.copytree(night / "store", tmp_path / f"{name}-store")), "night_index": 0}
        return write_stage(tmp_path / name, stage, inputs[stage], params, **SECTIONS[stage])

    return write


def steps_told(directory: Path) -> int:
    return max((line["step"] for line in read_lines(directory / METRICS) if "event" not in line), default=-1)


def finish(child: subprocess.Popen[bytes], directory: Path) -> None:
    assert child.wait(240) == 0, (directory / "log.txt").read_text()[-3000:]
    assert (directory / RESULT).exists()


def kill_at(directory: Path, stage: str, step: int) -> bool:
    """Start the stage, kill it as soon as it tells of `step`; whether it was still running then."""
    child = start_child(directory, stage)
    deadline = time.monotonic() + 240
    while child.poll() is None and steps_told(directory) < step and time.monotonic() < deadline:
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    return child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("stage", STEPS)
def test_killed_from_outside_and_run_again_is_the_same_run(make: Make, stage: str):
    straight, killed = make(stage, "straight"), make(stage, "killed")
    finish(start_child(straight, stage), straight)
    draws = random.Random(f"children/{stage}")
    deaths = [kill_at(killed, stage, draws.randint(1, STEPS[stage] // 2)) for _ in range(1)]
    deaths.append(kill_at(killed, stage, draws.randint(STEPS[stage] // 2, STEPS[stage] - 4)))
    assert any(deaths)
    assert not (killed / RESULT).exists() or not all(deaths)
    finish(start_child(killed, stage), killed)
    assert_same_run(straight, killed)
    again = start_child(killed, stage)
    finish(again, killed)
    assert_same_run(straight, killed)


def test_two_ranks_under_torchrun_are_one(tmp_path, snapshot, reference_folder):
    from tests.training.test_world import assert_close

    config = REWARD.model_copy(update={"max_tokens_per_microbatch": 400, "epochs": 1.0, "learning_rate": 1e-3})
    inputs = {"snapshot": snapshot, "reference": reference_folder}
    one, two = (write_stage(tmp_path / name, "reward", inputs, reward=config) for name in ("one", "two"))
    finish(start_child(one, "reward"), one)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "training")
    finish(start_child(two, "reward", *launcher), two)
    assert_close(one, two, "reward_model")


def test_a_full_disk_is_said_in_words_on_the_command_line(make: Make):
    straight, filled = make("sft", "straight"), make("sft", "filled")
    finish(start_child(straight, "sft"), straight)
    command = ["bash", "-c", 'ulimit -f 64; exec "$0" "$@"']  # blocks of 1 KiB
    from tests.training import stages

    run = subprocess.run(
        [*command, stages.sys.executable, "-m", "training", "sft", str(filled)], cwd=stages.ROOT, check=False,
        env=stages.stage_environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 2, run.stdout + run.stderr
    assert "CheckpointError" in run.stdout
    assert "free disk space" in run.stdout
    finish(start_child(filled, "sft"), filled)
    assert_same_run(straight, filled)

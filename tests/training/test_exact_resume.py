"""An uninterrupted run == one killed with SIGKILL again and again and gone on with, bit for bit.

Children are forked here, to spare the imports; test_exact_resume_children.py starts `python -m training` itself.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

import training.checkpoint
from configs.schema.base import Section
from configs.schema.guards import GuardRule, Mitigation
from tests.training.forks import KILLED, kill_at_call, kill_self, run_forked
from tests.training.same_run import assert_same_run, history
from tests.training.stages import DISTILL, GUARDS, PPO, REWARD, SFT, run_here, write_stage
from training.checkpoint import CheckpointFolder
from training.contract import METRICS, RESULT
from training.ppo.loop import PPOLoop
from training.ppo.state import Cursor
from training.recorder import Recorder, read_lines

Case = Callable[[str], Path]


@pytest.fixture
def case(
    request: pytest.FixtureRequest, tmp_path: Path, night: Path, snapshot: Path, base_folder: Path,
    reference_folder: Path, teacher_folder: Path, ppo_inputs: dict[str, Path],
) -> Case:  # fmt: skip
    """`case(name)`: the spec of the test's stage in a folder of its own, with a store of its own."""
    stage, sections = request.param
    inputs = {
        "sft": {"snapshot": snapshot, "base": base_folder},
        "reward": {"snapshot": snapshot, "reference": reference_folder},
        "distill": {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder},
        "ppo": ppo_inputs,
    }[stage]

    def make(name: str) -> Path:
        params = {}
        if stage == "ppo":
            params = {"store": str(shutil.copytree(night / "store", tmp_path / f"{name}-store")), "night_index": 0}
        return write_stage(tmp_path / name, stage, inputs, params, **sections)

    return make


def changed(section: Section, **changes: object) -> Section:
    return section.model_copy(update=changes)


EVERY_STEP = {"checkpoint_every": 1}
SLEEPY_ROLLBACK = GuardRule(
    metric="approx_kl", op="<", threshold=1e9, patience=6, action="rollback", max_rollbacks=9,
    then=Mitigation(kind="reduce_clip", to=0.15),
)  # fmt: skip
CASES = {
    "sft": ("sft", {"sft": changed(SFT, epochs=3.0, checkpoint_every=2, eval_every=3)}),
    "sft lora": ("sft", {"sft": changed(SFT, lora_rank=4, checkpoint_every=1)}),
    "reward": ("reward", {"reward": changed(REWARD, epochs=3.0, checkpoint_every=2, eval_every=3)}),
    "distill": ("distill", {"distill": changed(DISTILL, checkpoint_every=2, eval_every=3)}),
    "ppo": ("ppo", {"ppo": changed(PPO, checkpoint_every=2)}),
    "ppo early stop": ("ppo", {"ppo": changed(PPO, max_approx_kl=1e-7, ppo_epochs=4, ema_decay=0.8, **EVERY_STEP)}),
    "ppo rolled back": (
        "ppo", {"ppo": changed(PPO, rounds=5, checkpoint_every=3), "guards": changed(GUARDS, rules=[SLEEPY_ROLLBACK])},
    ),
}  # fmt: skip


def stage_of(directory: Path) -> str:
    from training.contract import read_spec

    return read_spec(directory).stage


def run(directory: Path) -> None:
    run_here(directory, stage_of(directory))


def die_at_record(directory: Path, number: int) -> None:
    """Run until the `number`-th metric line is about to be written."""
    Recorder.record = kill_at_call(number, Recorder.record)
    run(directory)


def die_at_step(directory: Path, step: int) -> None:
    """Run until the metrics of that optimiser step, or a later one, are about to be written."""
    record = Recorder.record

    def dying(self: Recorder, at: int, metrics: dict[str, float]) -> None:
        if at >= step:
            kill_self()
        record(self, at, metrics)

    Recorder.record = dying
    run(directory)


def die_inside_save(directory: Path, number: int) -> None:
    """Run until the `number`-th checkpoint is half written: tensors torn, nothing else there."""
    write = kill_at_call(0, training.checkpoint.save_file)
    calls = 0

    def torn(tensors, file) -> None:
        nonlocal calls
        calls += 1
        write(tensors, file)
        if calls == number:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            kill_self()

    mock.patch.object(training.checkpoint, "save_file", torn).start()
    run(directory)


def until_done(directory: Path, deaths: list[tuple[Callable[[Path, int], None], int]]) -> int:
    """Die as told, one child after another, then run to the end in a last one; returns how many really died."""
    died = 0
    for die, number in deaths:
        code = run_forked(lambda die=die, number=number: die(directory, number))
        assert code in (0, KILLED), (directory / METRICS).read_text()[-2000:]
        died += code == KILLED
        assert (code == KILLED) == (not (directory / RESULT).exists())
    assert run_forked(lambda: run(directory)) == 0
    return died


@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in CASES], indirect=True)
def test_killed_and_gone_on_with_is_the_same_run(case: Case, request: pytest.FixtureRequest):
    """Deaths inside a checkpoint write, early and where there is one before it, and at a seeded step of each third."""
    straight, killed = case("straight"), case("killed")
    assert run_forked(lambda: run(straight)) == 0
    last = max(line["step"] for line in history(straight) if "event" not in line)
    draws = random.Random(request.node.callspec.id)
    deaths = [(die_inside_save, draws.randint(1, 2))]
    deaths += [(die_at_step, draws.randint(third * last // 3 + 1, (third + 1) * last // 3)) for third in range(3)]
    deaths.insert(2, (die_inside_save, 1))
    assert until_done(killed, deaths) == 5
    assert_same_run(straight, killed)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in CASES], indirect=True)
def test_killed_at_every_single_step_is_the_same_run(case: Case):
    """Epoch and round boundaries included."""
    straight = case("straight")
    assert run_forked(lambda: run(straight)) == 0
    records = sum("event" not in line for line in read_lines(straight / METRICS))
    for number in range(1, records + 1):
        killed = case(f"killed-{number}")
        assert until_done(killed, [(die_at_record, number)]) == 1
        assert_same_run(straight, killed)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in CASES], indirect=True)
def test_killed_inside_every_single_checkpoint_write_is_the_same_run(case: Case):
    """Good states of PPO included: the one that a later rollback needs is always whole."""
    straight = case("straight")
    assert run_forked(lambda: run(straight)) == 0
    for number in range(1, 200):
        killed = case(f"killed-{number}")
        if until_done(killed, [(die_inside_save, number)]) == 0:
            break
        assert_same_run(straight, killed)
    assert number > 2


@pytest.mark.parametrize("case", [pytest.param(CASES["ppo rolled back"], id="ppo")], indirect=True)
def test_the_case_with_a_rollback_has_one(case: Case):
    straight = case("straight")
    assert run_forked(lambda: run(straight)) == 0
    kinds = [line["event"] for line in history(straight) if "event" in line]
    assert kinds.count("rollback") == 2
    assert kinds.count("mitigation") == 2


@pytest.mark.parametrize("case", [pytest.param(CASES["ppo early stop"], id="ppo")], indirect=True)
def test_the_case_with_an_early_stop_has_one(case: Case):
    straight = case("straight")
    assert run_forked(lambda: run(straight)) == 0
    assert [line["event"] for line in history(straight) if "event" in line].count("early_stop") >= 1


@pytest.mark.parametrize("case", [pytest.param(CASES["ppo early stop"], id="ppo")], indirect=True)
def test_killed_just_after_an_early_stop_the_round_stays_over(case: Case):
    """The checkpoint of that very step must say so."""
    straight, killed = case("straight"), case("killed")
    assert run_forked(lambda: run(straight)) == 0

    def early(cursor: Cursor) -> bool:
        return cursor.round_over and cursor.step_in_round < 8  # 4 epochs of 2 minibatches

    def dies() -> None:
        end = PPOLoop._end_round
        PPOLoop._end_round = lambda loop: kill_self() if early(loop.state.cursor) else end(loop)
        run(killed)

    assert run_forked(dies) == KILLED
    assert run_forked(lambda: run(killed)) == 0
    assert_same_run(straight, killed)


@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in ("sft", "ppo")], indirect=True)
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(case: Case):
    straight, killed = case("straight"), case("killed")
    assert run_forked(lambda: run(straight)) == 0
    assert run_forked(lambda: die_at_record(killed, 7)) == KILLED
    newest = CheckpointFolder(killed / "checkpoints").steps()[-1]
    state = killed / "checkpoints" / f"step_{newest:08d}" / "state.json"
    state.write_bytes(state.read_bytes()[:-9])
    assert run_forked(lambda: run(killed)) == 0
    refused = [line for line in history(killed) if line.get("event") == "checkpoint_refused"]
    assert len(refused) == 1
    assert f"step_{newest:08d}" in refused[0]["reason"]
    lines = (killed / METRICS).read_text().splitlines(keepends=True)
    (killed / METRICS).write_text("".join(line for line in lines if "checkpoint_refused" not in line))
    assert_same_run(straight, killed)


@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in ("reward", "ppo")], indirect=True)
def test_where_every_checkpoint_is_spoilt_the_run_begins_anew_and_says_why(case: Case):
    straight, killed = case("straight"), case("killed")
    assert run_forked(lambda: run(straight)) == 0
    assert run_forked(lambda: die_at_record(killed, 7)) == KILLED
    spoilt = list((killed / "checkpoints").rglob("tensors.safetensors"))
    for file in spoilt:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert run_forked(lambda: run(killed)) == 0
    refused = [line["reason"] for line in history(killed) if line.get("event") == "checkpoint_refused"]
    assert len(refused) == len(spoilt) == 2
    assert all("sha256 differs" in reason for reason in refused)
    lines = (killed / METRICS).read_text().splitlines(keepends=True)
    (killed / METRICS).write_text("".join(line for line in lines if "checkpoint_refused" not in line))
    assert_same_run(straight, killed)


@pytest.mark.parametrize("case", [pytest.param(CASES["sft"], id="sft")], indirect=True)
def test_a_full_disk_fails_the_stage_and_room_lets_it_go_on(case: Case):
    import resource

    straight, filled = case("straight"), case("filled")
    assert run_forked(lambda: run(straight)) == 0

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(training.checkpoint.CheckpointError, match="free disk space"):
            run(filled)

    assert run_forked(full) == 0
    assert not (filled / RESULT).exists()
    assert run_forked(lambda: run(filled)) == 0
    assert_same_run(straight, filled)

"""Every stage on two ranks that share its networks some way: what one rank makes, and what no kill changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from configs.schema.base import Section
from tests.training.conftest import store_params
from tests.training.engines.shared_network import FSDP2, ZERO
from tests.training.forks import KILLED, kill_at_call, run_forked
from tests.training.same_run import assert_same_run
from tests.training.stages import DISTILL, PPO, REWARD, SFT, run_here, write_stage
from tests.training.two_ranks import assert_close, run_both, run_shared
from training.contract import RESULT
from training.recorder import Recorder

pytest.importorskip("deepspeed")  # here, that the ranks need not import it each
STRATEGIES = {"fsdp2": FSDP2, "zero 2": ZERO[2], "zero 3": ZERO[3]}
SHARED = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
GENTLE = {"max_tokens_per_microbatch": 400, "epochs": 1.0, "learning_rate": 1e-3}
GENTLE_PPO = {
    "ppo_max_token_len": 300, "actor_lr": 1e-4, "critic_lr": 1e-3, "rounds": 2, "select_best": False, "ema_decay": 0.5,
}  # fmt: skip


def changed(section: Section, **changes: object) -> Section:
    return section.model_copy(update=changes)


@SHARED
@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_sft(tmp_path, snapshot, base_folder, strategy, lora_rank):
    config = changed(SFT, lora_rank=lora_rank, **GENTLE)
    run_both(tmp_path, "sft", {"snapshot": snapshot, "base": base_folder}, {}, "model", strategy, sft=config)


@SHARED
@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_reward(tmp_path, snapshot, reference_folder, strategy, lora_rank):
    inputs = {"snapshot": snapshot, "reference": reference_folder}
    config = changed(REWARD, lora_rank=lora_rank, **GENTLE)
    run_both(tmp_path, "reward", inputs, {}, "reward_model", strategy, reward=config)


@SHARED
def test_distill(tmp_path, snapshot, reference_folder, teacher_folder, strategy):
    inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder}
    run_both(tmp_path, "distill", inputs, {}, "reward_model", strategy, distill=changed(DISTILL, **GENTLE))


@SHARED
@pytest.mark.parametrize("lora_rank", [4, pytest.param(0, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_ppo(tmp_path, night, ppo_inputs, strategy, lora_rank):
    """Answers are drawn, the reference is the backbone without adapters or a frozen copy, the policy is averaged."""
    config = changed(PPO, lora_rank=lora_rank, **GENTLE_PPO)
    run_both(tmp_path, "ppo", ppo_inputs, store_params(night), "policy", strategy, ppo=config)


@pytest.fixture
def ppo_stage(tmp_path: Path, night: Path, ppo_inputs: dict[str, Path]):
    """`ppo_stage(name)`: a stage of its own with a store of its own."""

    def make(name: str) -> Path:
        store = shutil.copytree(night / "store", tmp_path / f"{name}-store")
        params, config = {"store": str(store), "night_index": 0}, changed(PPO, **GENTLE_PPO, checkpoint_every=1)
        return write_stage(tmp_path / name, "ppo", ppo_inputs, params, ppo=config)

    return make


def die_in(directory: Path, stage: str, strategy: dict[str, str], number: int) -> None:
    """Both ranks are killed when the `number`-th metric line is about to be written."""
    record = Recorder.record
    Recorder.record = kill_at_call(number, record)
    try:
        codes = run_shared(directory, stage, strategy)
    finally:
        Recorder.record = record
    assert KILLED in codes
    assert 0 not in codes
    assert not (directory / RESULT).exists()


@pytest.mark.slow
@SHARED
def test_ppo_killed_and_gone_on_with_is_the_same_run(ppo_stage, strategy):
    straight, killed = ppo_stage("straight"), ppo_stage("killed")
    assert run_shared(straight, "ppo", strategy) == [0, 0]
    die_in(killed, "ppo", strategy, 7)
    assert run_shared(killed, "ppo", strategy) == [0, 0]
    assert_same_run(straight, killed)


@SHARED
def test_sft_killed_and_gone_on_with_is_the_same_run(tmp_path, snapshot, base_folder, strategy):
    config = changed(SFT, **GENTLE, lora_rank=4, checkpoint_every=1, eval_every=2)
    straight, killed = (
        write_stage(tmp_path / name, "sft", {"snapshot": snapshot, "base": base_folder}, sft=config)
        for name in ("straight", "killed")
    )
    assert run_shared(straight, "sft", strategy) == [0, 0]
    die_in(killed, "sft", strategy, 3)
    assert run_shared(killed, "sft", strategy) == [0, 0]
    assert_same_run(straight, killed)


@SHARED
def test_begun_on_two_ranks_and_ended_on_one_and_the_other_way_round(tmp_path, snapshot, base_folder, strategy):
    """A checkpoint knows neither ranks nor strategy."""
    config = changed(SFT, **GENTLE, checkpoint_every=1)
    names = ("straight", "two then one", "one then two")
    straight, first, second = (
        write_stage(tmp_path / name, "sft", {"snapshot": snapshot, "base": base_folder}, sft=config) for name in names
    )
    die_in(first, "sft", strategy, 3)
    run_here(first, "sft")
    run_here(straight, "sft")
    assert_close(straight, first, "model")
    die_alone(second, 3)
    assert run_shared(second, "sft", strategy) == [0, 0]
    assert_close(straight, second, "model")


def die_alone(directory: Path, number: int) -> None:
    def work() -> None:
        Recorder.record = kill_at_call(number, Recorder.record)
        run_here(directory, "sft")

    assert run_forked(work) == KILLED

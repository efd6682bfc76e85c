"""Laws of the world: two ranks give the loss, the gradient and the weights of one, however the rows are dealt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from configs.schema.base import Section
from configs.schema.guards import GuardRule
from tests.training.conftest import store_params
from tests.training.forks import run_ranks
from tests.training.stages import DISTILL, GUARDS, PPO, REWARD, SFT, run_here, write_stage
from training.contract import METRICS, read_result
from training.metrics import Mean, MeanTable
from training.recorder import read_lines
from training.world import World, current_world

UNTIMED = ("time", "tokens_per_second")


def test_one_process_needs_no_group():
    world = current_world()
    assert world == World(0, 1)
    assert world.is_main
    tensor = torch.ones(2)
    assert world.sum_(tensor) is tensor
    assert torch.equal(tensor, torch.ones(2))
    parameter = torch.nn.Parameter(torch.ones(1))
    world.sum_gradients([parameter])
    assert parameter.grad is None
    world.barrier()
    assert world.gather({"a": 1}) == [{"a": 1}]


@given(items=st.lists(st.integers(), max_size=20), size=st.integers(1, 5))
def test_every_item_is_dealt_once(items, size):
    shares = [World(rank, size).share(items) for rank in range(size)]
    assert sorted(item for share in shares for item in share) == sorted(items)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_sums_cross_ranks():
    def work() -> None:
        world = current_world()
        assert world.size == 2
        total = world.sum_(torch.tensor([1.0, float(world.rank)]))
        assert total.tolist() == [2.0, 1.0]
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        parameters[0].grad = torch.full((2,), 1.0 + world.rank)
        if world.rank == 0:
            parameters[1].grad = torch.ones(2)
        world.sum_gradients(parameters)
        assert parameters[0].grad.tolist() == [3.0, 3.0]
        assert parameters[1].grad.tolist() == [1.0, 1.0]
        assert parameters[2].grad is None, "a zero gradient would be decayed; on one rank it is not"
        assert world.gather({"rank": world.rank, "é": [None] * world.rank}) == [
            {"rank": 0, "é": []},
            {"rank": 1, "é": [None]},
        ]
        world.barrier()

    assert run_ranks(2, work) == [0, 0]


def test_metrics_cross_ranks_even_from_a_rank_without_rows():
    def work() -> None:
        world = current_world()
        table = MeanTable()
        if world.rank == 0:
            table.add({"loss": Mean(6.0, 3.0), "margin": Mean(1.0, 2.0)})
        assert table.reduce(world) == {"loss": 2.0, "margin": 0.5}

    assert run_ranks(2, work) == [0, 0]


def history(directory: Path) -> list[dict]:
    steps = [line for line in read_lines(directory / METRICS) if "event" not in line]
    return [{key: value for key, value in line.items() if key not in UNTIMED} for line in steps]


def assert_close(one: Path, two: Path, role: str) -> None:
    """Weights and history of two runs agree to float tolerance."""
    first, second = history(one), history(two)
    assert [line["step"] for line in first] == [line["step"] for line in second]
    for line, other in zip(first, second, strict=True):
        assert line == pytest.approx(other, rel=2e-3, abs=2e-4)
    files = [Path(read_result(directory).output(role).path) for directory in (one, two)]
    names = [sorted(f.relative_to(folder) for f in folder.rglob("*.safetensors")) for folder in files]
    assert names[0] == names[1]
    assert names[0]
    for name in names[0]:
        left, right = (load_file(folder / name) for folder in files)
        for key, tensor in left.items():
            torch.testing.assert_close(right[key], tensor, atol=1e-4, rtol=1e-3)


def run_both(tmp_path: Path, stage: str, inputs: dict[str, Path], params: dict, role: str, **sections: Section) -> None:
    one = write_stage(tmp_path / "one", stage, inputs, params, **sections)
    two = write_stage(tmp_path / "two", stage, inputs, params, **sections)
    run_here(one, stage)
    assert run_ranks(2, lambda: run_here(two, stage)) == [0, 0]
    assert_close(one, two, role)


BUDGETS = pytest.mark.parametrize("budget", [400, 8192], ids=["many microbatches", "one microbatch"])


@BUDGETS
def test_sft_on_two_ranks_is_sft_on_one(tmp_path, snapshot, base_folder, budget):
    config = SFT.model_copy(update={"max_tokens_per_microbatch": budget, "epochs": 1.0, "learning_rate": 1e-3})
    run_both(tmp_path, "sft", {"snapshot": snapshot, "base": base_folder}, {}, "model", sft=config)


@BUDGETS
def test_reward_on_two_ranks_is_reward_on_one(tmp_path, snapshot, reference_folder, budget):
    config = REWARD.model_copy(update={"max_tokens_per_microbatch": budget, "epochs": 1.0, "learning_rate": 1e-3})
    inputs = {"snapshot": snapshot, "reference": reference_folder}
    run_both(tmp_path, "reward", inputs, {}, "reward_model", reward=config)


def test_distill_on_two_ranks_is_distill_on_one(tmp_path, snapshot, reference_folder, teacher_folder):
    config = DISTILL.model_copy(update={"max_tokens_per_microbatch": 400, "epochs": 1.0, "learning_rate": 1e-3})
    inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder}
    run_both(tmp_path, "distill", inputs, {}, "reward_model", distill=config)


@pytest.mark.parametrize("budget", [pytest.param(400, marks=pytest.mark.slow), 8192])
def test_ppo_on_two_ranks_is_ppo_on_one(tmp_path, night, ppo_inputs, budget):
    changes = {"ppo_max_token_len": budget, "actor_lr": 1e-4, "critic_lr": 1e-3, "rounds": 2, "select_best": False}
    config = PPO.model_copy(update=changes)
    run_both(tmp_path, "ppo", ppo_inputs, store_params(night), "policy", ppo=config)


@pytest.mark.slow
def test_a_rollback_on_two_ranks_is_the_rollback_of_one(tmp_path, night, ppo_inputs):
    """Both ranks see the same metrics, fire the same rule, and read the state that the main one wrote."""
    rule = GuardRule(metric="explained_variance", op="<", threshold=1e9, patience=6, action="rollback", max_rollbacks=9)
    changes = {"ppo_max_token_len": 200, "actor_lr": 1e-4, "critic_lr": 1e-3, "rounds": 4, "select_best": False}
    guards = GUARDS.model_copy(update={"rules": [rule]})
    config = PPO.model_copy(update=changes)
    run_both(tmp_path, "ppo", ppo_inputs, store_params(night), "policy", ppo=config, guards=guards)
    events = [line["event"] for line in read_lines(tmp_path / "two" / METRICS) if "event" in line]
    assert events.count("rollback") >= 1

"""Laws of the world: two ranks give the loss, the gradient and the weights of one, however the rows are dealt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.guards import GuardRule
from tests.training.conftest import store_params
from tests.training.forks import run_ranks
from tests.training.stages import DISTILL, GUARDS, PPO, REWARD, SFT
from tests.training.two_ranks import run_both
from training.contract import METRICS
from training.metrics import Mean, MeanTable
from training.recorder import read_lines
from training.world import World, current_world


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


@given(count=st.integers(1, 20), size=st.integers(1, 5), strategy=st.sampled_from(["ddp", "fsdp2"]))
def test_every_microbatch_is_dealt_once(count, size, strategy):
    """Ranks that go in step take as many turns; the turns beyond their share count for nothing."""
    hands = [World(rank, size, strategy).turns([[i] for i in range(count)]) for rank in range(size)]
    assert sorted(turn.items[0] for turns in hands for turn in turns if turn.counts) == list(range(count))
    lengths = {len(turns) for turns in hands}
    assert max(lengths) - min(lengths) <= (strategy == "ddp")
    assert all([turn.last for turn in turns] == [False] * (len(turns) - 1) + [True] for turns in hands if turns)
    assert strategy == "fsdp2" or all(turn.counts for turns in hands for turn in turns)


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

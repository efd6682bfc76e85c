"""Ranks whose devices differ in a number: all take the main rank's branch, and the run is as if they did not differ.

On the second of two ranks what is measured there is changed by far more than a bit, so that each of its own decisions
would be another one: the answers drawn, the state that is kept, the rows of the next round, whether a run goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import training.models.sampling
import training.ppo.probe
import training.ppo.rounds
import training.reward
from configs.schema.guards import GuardRule
from tests.training.engines.shared_network import FSDP2, spread_ranks
from tests.training.same_run import assert_same_run
from tests.training.stages import DISTILL, GUARDS, PPO, REWARD, SFT, run_here, write_stage
from training.errors import StageError
from training.scoring import ModelScorer
from training.sft import ImitationTask
from training.world import World, current_world

Patch = Callable[[], None]
SHARED = pytest.mark.parametrize("strategy", [{}, FSDP2], ids=["ddp", "fsdp2"])
GENTLE = {"max_tokens_per_microbatch": 400, "epochs": 1.0, "learning_rate": 1e-3}


def run_differing(directory: Path, stage: str, strategy: dict[str, str], differ: Patch | None) -> list[int]:
    """The stage on two ranks, the second of which differs; a rank that waits in vain is ended."""

    def work() -> None:
        if current_world().rank == 1 and differ is not None:
            differ()
        run_here(directory, stage)

    return spread_ranks(strategy, work, seconds=90.0)


def changing(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """What `owner.name` returns is changed from now on. For a rank of its own, which ends with it."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: change(function(*arguments, **options)))


def assert_undisturbed(straight: Path, differing: Path, stage: str, strategy: dict[str, str], differ: Patch) -> None:
    assert run_differing(straight, stage, strategy, None) == [0, 0]
    assert run_differing(differing, stage, strategy, differ) == [0, 0]
    assert_same_run(straight, differing)


@SHARED
def test_all_keep_the_state_that_the_main_rank_keeps(tmp_path, snapshot, base_folder, strategy):
    def differ() -> None:
        looks = iter(range(99))
        changing(ImitationTask, "validate", lambda found: found | {"validation_loss": float(next(looks))})

    config = SFT.model_copy(update=GENTLE | {"lora_rank": 4, "checkpoint_every": 2, "eval_every": 1})
    straight, differing = (
        write_stage(tmp_path / name, "sft", {"snapshot": snapshot, "base": base_folder}, sft=config)
        for name in ("straight", "differing")
    )
    assert_undisturbed(straight, differing, "sft", strategy, differ)


def test_no_rank_calls_a_reward_model_collapsed_that_the_main_rank_does_not(tmp_path, snapshot, reference_folder):
    """It would end before the others write what is spread over all of them."""

    def differ() -> None:
        def collapsed(report: Any, *_: Any) -> None:
            if report.loss < 0:
                raise StageError("collapsed")

        changing(training.reward, "held_out_report", lambda found: (vars_with(found[0], loss=-1.0), found[1]))
        training.reward.refuse_collapsed = collapsed

    config = REWARD.model_copy(update=GENTLE)
    straight, differing = (
        write_stage(tmp_path / name, "reward", {"snapshot": snapshot, "reference": reference_folder}, reward=config)
        for name in ("straight", "differing")
    )
    assert_undisturbed(straight, differing, "reward", FSDP2, differ)


def vars_with(record: Any, **changes: Any) -> Any:
    return type(record)(**vars(record) | changes)


def other_ppo(norms: bool) -> Patch:
    """Everything that a round of PPO measures is another on this rank."""

    def differ() -> None:
        draw = training.models.sampling.draw
        training.models.sampling.draw = lambda logits, uniforms, how: draw(logits, 1.0 - uniforms, how)
        changing(ModelScorer, "scores", lambda found: np.float32(-3.0) * found[::-1])
        changing(training.ppo.probe, "exact_kl", lambda found: (9.0, 9.0))
        changing(training.ppo.probe, "perplexity", lambda found: 1e9)
        changing(training.ppo.rounds, "pass_log_probs_and_values", lambda found: (found[0] - 1.0, found[1] + 5.0))
        changing(training.ppo.rounds, "td_errors", lambda found: found.flip(0))
        if norms:  # of whole gradients: where they are in parts, each rank's word is a summand
            changing(torch.nn.utils, "get_total_norm", lambda found: 2.0 * found)

    return differ


@SHARED
def test_a_round_of_ppo_is_the_main_ranks(tmp_path, night, ppo_inputs, strategy):
    """Answers, scores, priorities, the probe, the guards, the early stop, and the round that is handed on."""
    rule = GuardRule(metric="kl_ref", op=">", threshold=5.0, action="rollback")
    ppo = PPO.model_copy(update={"rounds": 2, "ppo_max_token_len": 300, "checkpoint_every": 3, "max_approx_kl": 0.05})
    sections = {"ppo": ppo, "guards": GUARDS.model_copy(update={"rules": [rule]})}

    def stage(name: str) -> Path:
        store = shutil.copytree(night / "store", tmp_path / f"{name}-store")
        return write_stage(tmp_path / name, "ppo", ppo_inputs, {"store": str(store), "night_index": 0}, **sections)

    differ = other_ppo(norms=not strategy)
    assert_undisturbed(stage("straight"), stage("differing"), "ppo", strategy, differ)


def test_the_students_own_answers_are_the_main_ranks(tmp_path, snapshot, reference_folder, teacher_folder):
    def differ() -> None:
        draw = training.models.sampling.draw
        training.models.sampling.draw = lambda logits, uniforms, how: draw(logits, 1.0 - uniforms, how)

    inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder}
    straight, differing = (
        write_stage(tmp_path / name, "distill", inputs, distill=DISTILL.model_copy(update=GENTLE))
        for name in ("straight", "differing")
    )
    assert_undisturbed(straight, differing, "distill", FSDP2, differ)


def test_the_main_ranks_word_and_numbers_reach_all():
    def work() -> None:
        world = current_world()
        mine = {"loss": [1.5, float("inf")], "é": None} if world.is_main else {"another": [world.rank] * 999}
        assert world.broadcast(mine) == {"loss": [1.5, float("inf")], "é": None}
        assert world.broadcast_(torch.full((2,), float(world.rank))).tolist() == [0.0, 0.0]

    assert spread_ranks({}, work) == [0, 0]


def test_alone_one_keeps_ones_own():
    item, tensor = {"a": (1, 2)}, torch.ones(2)
    assert World().broadcast(item) is item
    assert World().broadcast_(tensor) is tensor

"""DeepSpeed's ZeRO stages on two gloo ranks give what one rank gives, refuse what it refuses, resume bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.engines.shared_network import (
    SETTINGS,
    ZERO,
    Case,
    build,
    on_one_rank,
    on_two_ranks,
    spread_ranks,
    train,
    worst_difference,
)
from tests.training.same_run import assert_same_tensors
from training.engines.choose import build_engine
from training.engines.weights import shape_of
from training.models.sampling import SamplingSettings, sample_responses
from training.world import World, current_world

pytest.importorskip("deepspeed")  # here, that the ranks need not import it each


@pytest.mark.parametrize("stage", ZERO)
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "lora"])
def test_two_ranks_train_what_one_trains(base_folder: Path, tmp_path: Path, stage: int, lora: bool):
    """A step is not finite on the second rank alone: both refuse it, and the gradients after it owe it nothing."""
    case = Case(base_folder, lora, head=lora)
    two = on_two_ranks(ZERO[stage], case, tmp_path / "two", poisoned=2)
    one = on_one_rank(case, poisoned=2)
    assert one["norms"].isnan().tolist() == [False, False, True, False, False]
    torch.testing.assert_close(two["norms"], one["norms"], rtol=1e-5, atol=0, equal_nan=True)
    assert (one["norms"] > 0.2).any(), "nothing was clipped"
    assert worst_difference(one, two, "network") < 1e-5
    assert worst_difference(one, two, "optimizer") < 1e-6


@pytest.mark.parametrize("stage", ZERO)
def test_state_goes_back_bit_for_bit(base_folder: Path, tmp_path: Path, stage: int):
    case = Case(base_folder, lora=True, head=True)
    straight = on_two_ranks(ZERO[stage], case, tmp_path / "straight", steps=3)
    assert_same_tensors(on_two_ranks(ZERO[stage], case, tmp_path / "cut", steps=3, cut=2), straight)


def test_at_stage_3_a_rank_keeps_parts_and_has_all_of_it_for_drawing(base_folder: Path):
    """While it draws, a rank asks nothing of the other, which draws less or more; afterwards parts are left again."""
    case, settings = Case(base_folder, lora=True, head=True), SamplingSettings(max_new_tokens=6)
    prompts, draws = [(5, 6, 7), (8, 9), (1, 10, 11, 12)], torch.Generator()
    alone = sample_responses(build(case, World()), prompts, settings, draws.manual_seed(1))

    def work() -> None:
        world = current_world()
        network = build(case, world)
        assert network.head is not None
        drawn = sample_responses(network, prompts[: 1 + 2 * world.rank], settings, draws.manual_seed(1))
        assert drawn[0].token_ids == alone[0].token_ids
        assert [s.token_ids for s in drawn] == [s.token_ids for s in alone] or world.is_main
        train(network, build_engine(network, SETTINGS, world), world, range(2))
        weights = [*network.backbone.base.parameters(), *network.head.parameters()]
        assert all(p.numel() == 0 for p in weights), "left whole after a step"
        parts = sum(p.ds_tensor.numel() for p in weights)
        assert parts <= sum(shape_of(p).numel() + 1 for p in weights) / 2
        with network.backbone.whole():
            assert all(p.shape == shape_of(p) for p in network.backbone.base.parameters())
        assert all(p.numel() == 0 for p in network.backbone.base.parameters())

    assert spread_ranks(ZERO[3], work) == [0, 0]


def test_adapters_in_float32_on_a_base_in_bfloat16_at_stage_3(base_folder: Path, tmp_path: Path):
    """A module's weights of two types are gathered each in its own, and the head's as well."""
    case = Case(base_folder, lora=True, head=True, dtype=torch.bfloat16)
    two, one = on_two_ranks(ZERO[3], case, tmp_path / "two", steps=2), on_one_rank(case, steps=2)
    assert {tensor.dtype for name, tensor in two.items() if "lora" in name} == {torch.float32}
    torch.testing.assert_close(two["norms"], one["norms"], rtol=1e-2, atol=0)

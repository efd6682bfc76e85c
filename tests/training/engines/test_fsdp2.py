"""FSDP2 on two gloo ranks gives what one rank gives: weights, moments, norms, refusals; and it resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.engines.shared_network import (
    FSDP2,
    Case,
    on_one_rank,
    on_two_ranks,
    worst_difference,
)
from tests.training.same_run import assert_same_tensors

CASES = {
    "full": {"lora": False, "head": False},
    "full with head": {"lora": False, "head": True},
    "lora": {"lora": True, "head": False},
    "lora with head, layers recomputed": {"lora": True, "head": True, "checkpointing": True},
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, base_folder: Path) -> Case:
    return Case(base_folder, **request.param)


def test_two_ranks_train_what_one_trains(case: Case, tmp_path: Path):
    """Three microbatches a step: the second rank takes one of them, and goes in step with the third."""
    two = on_two_ranks(FSDP2, case, tmp_path / "two")
    one = on_one_rank(case)
    torch.testing.assert_close(two["norms"], one["norms"], rtol=1e-5, atol=0)
    assert (one["norms"] > 0.2).any(), "nothing was clipped"
    assert worst_difference(one, two, "network") < 1e-5
    assert worst_difference(one, two, "optimizer") < 1e-6


def test_a_gradient_that_is_not_finite_is_refused_on_all_ranks(base_folder: Path, tmp_path: Path):
    """It arises on the second rank's microbatch alone; what follows is as on one rank."""
    case = Case(base_folder, lora=True, head=True)
    two = on_two_ranks(FSDP2, case, tmp_path / "two", poisoned=2)
    one = on_one_rank(case, poisoned=2)
    assert two["norms"].isnan().tolist() == one["norms"].isnan().tolist() == [False, False, True, False, False]
    assert worst_difference(one, two, "network") < 1e-5


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_state_goes_back_bit_for_bit(base_folder: Path, tmp_path: Path, lora: bool):
    case = Case(base_folder, lora, head=True)
    straight = on_two_ranks(FSDP2, case, tmp_path / "straight")
    assert_same_tensors(on_two_ranks(FSDP2, case, tmp_path / "cut", cut=2), straight)


def test_adapters_in_float32_on_a_base_in_bfloat16(base_folder: Path, tmp_path: Path):
    """A layer's weights of two types are gathered together, each in its own."""
    case = Case(base_folder, lora=True, head=True, dtype=torch.bfloat16)
    two, one = on_two_ranks(FSDP2, case, tmp_path / "two", steps=2), on_one_rank(case, steps=2)
    assert {tensor.dtype for name, tensor in two.items() if "lora" in name} == {torch.float32}
    torch.testing.assert_close(two["norms"], one["norms"], rtol=1e-2, atol=0)

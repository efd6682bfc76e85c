"""DeepSpeed's ZeRO stages on two gloo ranks give what one rank gives, refuse what it refuses, resume bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.engines.shared_network import ZERO, Case, on_one_rank, on_two_ranks, worst_difference
from tests.training.same_run import assert_same_tensors

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

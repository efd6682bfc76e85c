"""Laws of token log-probabilities and entropies, and what they cost in memory."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.objectives import oracles
from tests.training.objectives.cases import LAWS, close, gradient, normal, seeds, tensor
from training.objectives import token_entropy, token_log_probs

log_probs_module = importlib.import_module("training.objectives.log_probs")


def random_logits(seed: int, *shape: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    return tensor(normal(rng, *shape, scale=scale)), torch.tensor(rng.integers(0, shape[-1], shape[:-1]))


# distributions


@LAWS
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.floats(0.1, 5.0), seeds)
def test_probabilities_sum_to_one(rows: int, columns: int, vocabulary: int, temperature: float, seed: int) -> None:
    logits, _ = random_logits(seed, rows, columns, vocabulary)
    every_label = [torch.full((rows, columns), label) for label in range(vocabulary)]
    total = sum(token_log_probs(logits, label, temperature).exp() for label in every_label)
    close(total, np.ones((rows, columns)), rtol=1e-5)


@LAWS
@given(seeds, st.floats(-100.0, 100.0), st.floats(0.3, 3.0))
def test_a_shift_of_all_logits_does_not_show(seed: int, shift: float, temperature: float) -> None:
    logits, labels = random_logits(seed, 2, 3, 7)
    shifted = (logits.double() + shift).float()
    close(
        token_log_probs(shifted, labels, temperature),
        token_log_probs(logits, labels, temperature).double().numpy(),
        atol=2e-4,
    )
    close(token_entropy(shifted, temperature), token_entropy(logits, temperature).double().numpy(), atol=2e-4)


@LAWS
@given(seeds, st.floats(0.2, 4.0))
def test_entropy_is_the_expected_surprise(seed: int, temperature: float) -> None:
    logits, _ = random_logits(seed, 3, 6)
    log_p = torch.stack([token_log_probs(logits, torch.full((3,), v), temperature) for v in range(6)], dim=-1)
    close(token_entropy(logits, temperature), -(log_p.exp() * log_p).sum(-1).double().numpy())


def test_temperature_limits() -> None:
    logits, labels = random_logits(0, 4, 8)
    close(token_log_probs(logits, labels, 1e6), np.full(4, -math.log(8)), atol=1e-4)
    close(token_entropy(logits, 1e6), np.full(4, math.log(8)), atol=1e-4)
    close(token_log_probs(logits, logits.argmax(-1), 1e-3), np.zeros(4), atol=1e-4)
    close(token_entropy(logits, 1e-3), np.zeros(4), atol=1e-4)


def test_large_logits_keep_their_digits() -> None:
    """exp overflows here, and x - logsumexp(x) would lose what 1e4 swallows."""
    rng = np.random.default_rng(3)
    logits, labels = normal(rng, 4, 9) + 1e4, rng.integers(0, 9, 4)
    logits = logits.astype(np.float32).astype(np.float64)
    close(token_log_probs(tensor(logits), torch.tensor(labels), 0.7), oracles.token_log_probs(logits, labels, 0.7))
    close(token_entropy(tensor(logits), 0.7), oracles.token_entropy(logits, 0.7))


def test_tokens_ruled_out() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf, 2.0, -math.inf]], requires_grad=True)
    entropy = token_entropy(logits)
    close(entropy, [math.log(2), 0.0])
    log_probs = token_log_probs(logits, torch.tensor([0, 1]))
    close(log_probs, [-math.log(2), 0.0])
    (entropy.sum() + log_probs.sum()).backward()
    close(gradient(logits), [[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]])
    assert float(token_log_probs(logits, torch.tensor([1, 1]))[0].detach()) == -math.inf


# gradients


def test_gradient_by_finite_differences_of_the_implementation() -> None:
    """Central differences in float32: a step of 1e-2 balances truncation (h^2) and rounding (eps / h)."""
    logits, labels = random_logits(5, 3, 5, scale=1.0)
    leaf = logits.clone().requires_grad_()
    (token_log_probs(leaf, labels, 0.8) + token_entropy(leaf, 0.8)).square().sum().backward()
    estimate = np.zeros(logits.shape)
    for index in np.ndindex(*logits.shape):
        step = torch.zeros_like(logits)
        step[index] = 1e-2
        up, down = (
            float((token_log_probs(x, labels, 0.8) + token_entropy(x, 0.8)).square().sum().double())
            for x in (logits + step, logits - step)
        )
        estimate[index] = (up - down) / 2e-2
    close(gradient(leaf), estimate, rtol=5e-3, atol=2e-3)


def test_score_has_mean_zero() -> None:
    """sum over y of p(y) d log p(y) / d logits = 0: the gradient of a constant."""
    logits, _ = random_logits(1, 1, 6)
    leaf = logits.clone().requires_grad_()
    all_labels = torch.arange(6)
    log_p = token_log_probs(leaf.expand(6, 6), all_labels, 1.3)
    (log_p.detach().exp() * log_p).sum().backward()
    close(gradient(leaf), np.zeros((1, 6)))


def test_ignored_labels_give_zero_and_no_gradient() -> None:
    logits, labels = random_logits(2, 2, 3, 5)
    labels[0, 1] = -100
    logits[0, 1] = math.nan
    leaf = logits.clone().requires_grad_()
    out = token_log_probs(leaf, labels)
    assert float(out[0, 1].detach()) == 0.0
    out.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad[0, 1] == 0).all()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[1] != 0).all()


def test_nan_in_a_valid_row_is_not_hidden() -> None:
    logits, labels = random_logits(2, 2, 5)
    logits[1, 3] = math.nan
    leaf = logits.requires_grad_()
    out = token_log_probs(leaf, labels) + token_entropy(leaf)
    assert out.isnan().tolist() == [False, True]
    out.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isnan().any(dim=-1).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = random_logits(4, 3, 4, 33)
    low = logits.to(dtype).requires_grad_()
    exact = low.detach().float().requires_grad_()
    for function in (lambda x: token_log_probs(x, labels, 0.9), lambda x: token_entropy(x, 0.9)):
        low.grad = exact.grad = None
        out, expected = function(low), function(exact)
        close(out, expected.detach().double().numpy(), rtol=0, atol=1e-6)
        out.sum().backward()
        expected.sum().backward()
        assert low.grad is not None
        assert low.grad.dtype == dtype
        assert exact.grad is not None
        assert torch.equal(low.grad, exact.grad.to(dtype)) or dtype == torch.float64


# memory


class Allocations(TorchDispatchMode):
    """Records (dtype, number of elements) of every tensor with storage of its own that an operation produced."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in held:
                self.made.append((x.dtype, x.numel()))
        return out

    def largest(self, dtype: torch.dtype) -> int:
        return max((size for kind, size in self.made if kind == dtype), default=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_no_second_float32_tensor_of_the_size_of_the_logits(dtype: torch.dtype, sliced: bool, entropy: bool) -> None:
    full = torch.randn(4, 33, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = (full[:, :-1] if sliced else full[:, :-1].contiguous()).detach().requires_grad_()
    labels = torch.zeros(4, 32, dtype=torch.long)
    with Allocations() as forward:
        out = (token_entropy(logits) if entropy else token_log_probs(logits, labels)).sum()
    with Allocations() as backward:
        torch.autograd.grad(out, logits)
    eighth = logits.numel() // 8
    assert 0 < forward.largest(torch.float32) <= eighth
    assert forward.largest(torch.bfloat16) <= eighth
    # In backward one tensor of that size: the gradient itself, in the dtype of the logits. No softmax beside it.
    assert [made for made in backward.made if made[1] > eighth] == [(dtype, logits.numel())]


def test_the_probe_sees_a_copy() -> None:
    logits, labels = random_logits(0, 4, 8, 16)
    with Allocations() as naive:
        torch.log_softmax(logits.bfloat16().float(), -1).gather(-1, labels.unsqueeze(-1))
    assert naive.largest(torch.float32) == logits.numel()


def test_autograd_keeps_the_logits_and_little_else() -> None:
    logits, labels = random_logits(0, 4, 16, 64)
    leaf = logits.bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        (token_log_probs(leaf, labels).sum() + token_entropy(leaf).sum()).backward()
    others = [x for x in kept if x.data_ptr() != leaf.data_ptr()]
    assert len(kept) > len(others)
    assert max(x.numel() for x in others) <= labels.numel()


# blocks


@LAWS
@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 60))
def test_blocks_cover_every_row_once(rows: list[int], vocabulary: int, room: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_probs_module, "_BLOCK_ELEMENTS", room)
        seen = torch.zeros(rows, dtype=torch.long)
        for block in log_probs_module._blocks(torch.Size([*rows, vocabulary])):
            seen[block] += 1
            assert seen[block].numel() * vocabulary <= max(room, vocabulary)
            assert seen[block].numel() <= max(1, -(-seen.numel() // 8))
    assert (seen == 1).all()


@LAWS
@given(st.integers(1, 40), seeds)
def test_block_size_does_not_show(room: int, seed: int) -> None:
    logits, labels = random_logits(seed, 2, 3, 4)
    expected = token_log_probs(logits, labels), token_entropy(logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_probs_module, "_BLOCK_ELEMENTS", room)
        assert torch.equal(token_log_probs(logits, labels), expected[0])
        assert torch.equal(token_entropy(logits), expected[1])


def test_views_give_what_copies_give() -> None:
    storage, _ = random_logits(0, 3, 5, 4, 6)
    for view in (storage[:, :-1], storage.transpose(0, 2), storage[..., ::2], storage.permute(3, 1, 2, 0)):
        some = torch.zeros(view.shape[:-1], dtype=torch.int32)
        leaf, copy = view.detach().requires_grad_(), view.contiguous().detach().requires_grad_()
        out, expected = token_log_probs(leaf, some), token_log_probs(copy, some)
        assert torch.equal(out, expected)
        (out.square().sum() + token_entropy(leaf).sum()).backward()
        (expected.square().sum() + token_entropy(copy).sum()).backward()
        close(gradient(leaf), gradient(copy))


def test_no_rows() -> None:
    logits = torch.zeros(2, 0, 5, requires_grad=True)
    out = token_log_probs(logits, torch.zeros(2, 0, dtype=torch.long)).sum() + token_entropy(logits).sum()
    out.backward()
    assert float(out.detach()) == 0.0


# errors


def test_wrong_inputs_are_refused() -> None:
    logits, labels = random_logits(0, 2, 3, 4)
    with pytest.raises(TypeError, match="logits must be floating"):
        token_log_probs(labels, labels)
    with pytest.raises(TypeError, match="labels must be integers"):
        token_log_probs(logits, labels.float())
    with pytest.raises(ValueError, match=r"labels have shape \(2, 2\)"):
        token_log_probs(logits, labels[:, :-1])
    for bad in (4, -1):
        wrong = labels.clone()
        wrong[1, 2] = bad
        with pytest.raises(ValueError, match=f"label {bad} is outside the vocabulary of 4"):
            token_log_probs(logits, wrong)
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            token_log_probs(logits, labels, temperature)
        with pytest.raises(ValueError, match="temperature"):
            token_entropy(logits, temperature)
    with pytest.raises(ValueError, match="logits must have shape"):
        token_entropy(logits[0, 0])
    with pytest.raises(ValueError, match="V > 0"):
        token_entropy(torch.zeros(2, 0))

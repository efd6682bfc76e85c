"""Laws of the KL estimators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.training.objectives.cases import LAWS, close, gradient, normal, seeds, tensor
from training.objectives import KL_KINDS, kl_penalty, token_log_probs

finite = st.floats(-1e4, 1e4, width=32)


def distributions(seed: int, vocabulary: int = 6) -> tuple[Tensor, Tensor]:
    """Logits of a policy and of a reference close enough that k3 is not cut at 10."""
    rng = np.random.default_rng(seed)
    policy = normal(rng, 1, vocabulary, scale=0.7)
    return tensor(policy), tensor(policy + normal(rng, 1, vocabulary, scale=0.3))


def all_log_probs(logits: Tensor) -> Tensor:
    vocabulary = logits.shape[-1]
    return token_log_probs(logits.expand(vocabulary, vocabulary), torch.arange(vocabulary))


@LAWS
@given(st.lists(finite, min_size=1, max_size=8), seeds)
def test_signs_and_symmetries(gaps: list[float], seed: int) -> None:
    d = torch.tensor(gaps)
    zero = torch.zeros_like(d)
    assert torch.equal(kl_penalty(d, zero, "k1"), -kl_penalty(zero, d, "k1"))
    assert torch.equal(kl_penalty(d, zero, "abs"), kl_penalty(d, zero, "k1").abs())
    assert torch.equal(kl_penalty(d, zero, "k2"), kl_penalty(zero, d, "k2"))
    k3 = kl_penalty(d, zero, "k3")
    assert (k3 >= 0).all()
    assert (k3 <= 10).all()
    for kind in KL_KINDS:
        assert (kl_penalty(d, d, kind) == 0).all()


@LAWS
@given(seeds)
def test_k1_and_k3_are_unbiased_on_the_policys_own_samples(seed: int) -> None:
    policy, reference = distributions(seed)
    log_p, log_q = all_log_probs(policy), all_log_probs(reference)
    exact = float((log_p.exp() * (log_p - log_q)).sum())
    for kind in ("k1", "k3"):
        close((log_p.exp() * kl_penalty(log_p, log_q, kind)).sum(), exact, rtol=1e-4)


@LAWS
@given(seeds)
def test_the_straight_through_gradient_is_that_of_the_divergence(seed: int) -> None:
    """Expected over the policy's samples, d * grad log p is grad KL; the plain gradients of k1 (0) and k3 are not."""
    policy, reference = distributions(seed)
    leaf = policy.clone().requires_grad_()
    log_p, log_q = all_log_probs(leaf), all_log_probs(reference)
    (log_p.exp() * (log_p - log_q)).sum().backward()
    exact = gradient(leaf).copy()
    for kind in ("k2", "k1+", "abs+", "k2+", "k3+"):
        leaf.grad = None
        log_p = all_log_probs(leaf)
        (log_p.detach().exp() * kl_penalty(log_p, log_q, kind)).sum().backward()
        close(gradient(leaf), exact, rtol=1e-4, atol=1e-5, what=kind)
    leaf.grad = None
    log_p = all_log_probs(leaf)
    (log_p.detach().exp() * kl_penalty(log_p, log_q, "k1")).sum().backward()
    close(gradient(leaf), np.zeros((1, 6)), atol=1e-5)


@LAWS
@given(st.lists(finite, min_size=1, max_size=8))
def test_straight_through_keeps_the_value_and_takes_the_gradient_of_k2(gaps: list[float]) -> None:
    reference = torch.zeros(len(gaps))
    square = torch.tensor(gaps, requires_grad=True)
    kl_penalty(square, reference, "k2").sum().backward()
    for kind in KL_KINDS:
        through = torch.tensor(gaps, requires_grad=True)
        out = kl_penalty(through, reference, kind + "+")
        assert torch.equal(out.detach(), kl_penalty(through.detach(), reference, kind))
        out.sum().backward()
        assert torch.equal(through.grad, square.grad)


def test_k3_where_policies_are_close() -> None:
    """exp(-d) + d - 1 in float32 is off by a factor here, and may be negative."""
    d = torch.tensor([1e-3, -1e-3, 1e-4, -1e-4, 3e-5])
    exact = [math.expm1(-x) + x for x in d.double().tolist()]
    close(kl_penalty(d, torch.zeros(5), "k3"), exact, rtol=2e-2, atol=0)


@pytest.mark.parametrize("gap", [-1e38, -1e9, -30.0, -20.0, 20.0, 30.0, 1e9, 1e38])
def test_extreme_gaps_stay_bounded(gap: float) -> None:
    now = torch.tensor([gap], requires_grad=True)
    out = kl_penalty(now, torch.zeros(1), "k3")
    close(out, [10.0])
    out.backward()
    close(gradient(now), [0.0])
    through = torch.tensor([gap], requires_grad=True)
    kl_penalty(through, torch.zeros(1), "k3+").backward()
    close(gradient(through), [gap])


@pytest.mark.parametrize("kind", [*KL_KINDS, *(kind + "+" for kind in KL_KINDS)])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_slot_that_is_not_finite_passes_no_gradient(kind: str, poison: float) -> None:
    now = torch.tensor([0.5, poison, 0.25], requires_grad=True)
    ref = torch.tensor([0.0, 0.0, poison])
    out = kl_penalty(now, ref, kind)
    torch.where(torch.tensor([True, False, False]), out, 0.0).sum().backward()
    assert now.grad is not None
    assert now.grad.isfinite().all()
    assert now.grad[1:].eq(0).all()
    assert now.grad[0] != 0
    if math.isnan(poison):
        assert out.isnan().tolist() == [False, True, True]  # seen, not hidden


def test_float32_whatever_comes_in() -> None:
    low = torch.tensor([-1.5, -0.25], dtype=torch.bfloat16)
    for kind in KL_KINDS:
        assert kl_penalty(low, low.double(), kind).dtype == torch.float32


def test_wrong_inputs_are_refused() -> None:
    x = torch.zeros(2, 3)
    for kind in ("kl", "k4", "k1++", "+", ""):
        with pytest.raises(ValueError, match="unknown KL kind"):
            kl_penalty(x, x, kind)
    with pytest.raises(ValueError, match="ref_log_probs has shape"):
        kl_penalty(x, x[:1], "k1")
    with pytest.raises(TypeError, match="floating"):
        kl_penalty(x, x.long(), "k1")

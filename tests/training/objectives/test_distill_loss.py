"""Laws of the distillation of one reward model into another."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence

from tests.training.objectives import oracles
from tests.training.objectives.cases import LAWS, close, gradient, normal, seeds, tensor
from training.objectives import bradley_terry_loss, distill_loss, distill_terms, preference_kl

margins = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8)
ALL = {"margin_weight": 0.3, "pointwise_weight": 0.7, "label_weight": 0.9}


def scores(seed: int, n: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    one, two, three, four = normal(rng, 4, n, scale=1.5)
    return tensor(one), tensor(two), tensor(three), tensor(four)


# preference_kl


@LAWS
@given(margins, seeds)
def test_zero_at_the_teacher_and_never_negative(teacher: list[float], seed: int) -> None:
    t = torch.tensor(teacher)
    close(preference_kl(t, t), 0.0, atol=0)
    nudged = t + tensor(normal(np.random.default_rng(seed), len(teacher), scale=1e-3))
    student = nudged.clone().requires_grad_()
    out = preference_kl(t, student)
    assert float(out.detach()) >= 0
    out.backward()
    assert np.isfinite(gradient(student)).all()


@LAWS
@given(seeds, st.floats(0.1, 8.0))
def test_it_is_the_divergence_of_two_coins(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    teacher, student = normal(rng, 2, 7, scale=scale)
    coins = (Bernoulli(logits=torch.tensor(x)) for x in (teacher, student))
    expected = float(kl_divergence(*coins).mean())
    close(preference_kl(tensor(teacher), tensor(student)), expected, rtol=1e-4)
    close(
        preference_kl(tensor(-teacher), tensor(-student)), expected, rtol=1e-4
    )  # names of the two sides do not matter


@LAWS
@given(seeds)
def test_gradient_is_the_gap_of_the_probabilities(seed: int) -> None:
    teacher, student, *_ = scores(seed)
    leaf = student.clone().requires_grad_()
    preference_kl(teacher, leaf).backward()
    close(gradient(leaf), ((student.double().sigmoid() - teacher.double().sigmoid()) / 6).numpy())


@pytest.mark.parametrize(
    ("teacher", "student", "expected"),
    [
        (1e4, 1e4, 0.0),
        (1e4, -1e4, 1e4),
        (-1e4, 1e4, 1e4),
        (200.0, 0.0, math.log(2)),
        (0.0, 200.0, 100.0 - math.log(2)),
        (-90.0, -100.0, 0.0),
    ],
)
def test_large_margins(teacher: float, student: float, expected: float) -> None:
    leaf = torch.tensor([student], requires_grad=True)
    out = preference_kl(torch.tensor([teacher]), leaf)
    close(out, expected, rtol=1e-6)
    out.backward()
    assert np.isfinite(gradient(leaf)).all()


# distill_loss


def test_the_loss_is_the_weighted_sum_of_its_terms() -> None:
    given_scores = scores(0)
    terms = distill_terms(*given_scores, temperature=2.0)
    expected = terms.preference_kl + 0.3 * terms.margin_error + 0.7 * terms.pointwise_error + 0.9 * terms.label_loss
    assert torch.equal(distill_loss(*given_scores, temperature=2.0, **ALL), expected)
    alone = distill_loss(*given_scores, margin_weight=0.0, pointwise_weight=0.0, label_weight=0.0)
    close(alone, float(preference_kl(given_scores[0] - given_scores[1], given_scores[2] - given_scores[3])))


@LAWS
@given(st.integers(1, 9), seeds, st.floats(0.3, 4.0))
def test_any_pairs_agree_with_the_oracle(n: int, seed: int, temperature: float) -> None:
    given_scores = scores(seed, n)
    terms = distill_terms(*given_scores, temperature=temperature)
    expected = oracles.distill_terms(*(x.double().numpy() for x in given_scores), temperature)
    for name, got, value in zip(terms._fields, terms, expected, strict=True):
        close(got, value, rtol=1e-4, atol=1e-5, what=name)


@LAWS
@given(seeds, st.floats(-50, 50))
def test_a_student_that_is_the_teacher_up_to_a_constant_is_done(seed: int, constant: float) -> None:
    chosen, rejected, *_ = scores(seed)
    student = [(x.double() + constant).float() for x in (chosen, rejected)]
    terms = distill_terms(chosen, rejected, *student)
    close(terms.preference_kl, 0.0, atol=1e-5)
    close(terms.margin_error, 0.0, atol=1e-5)
    close(terms.pointwise_error, 0.0, atol=1e-5)
    close(terms.label_loss, float(bradley_terry_loss(chosen, rejected)), rtol=1e-4, atol=1e-5)


def test_by_hand() -> None:
    """Teacher (1, 0), student (3, 0): margins differ by 2; centred (0.5, -0.5) and (1.5, -1.5) differ by 1 each."""
    terms = distill_terms(*(torch.tensor([x]) for x in (1.0, 0.0, 3.0, 0.0)))
    close(terms.margin_error, 4.0)
    close(terms.pointwise_error, 1.0)
    close(terms.label_loss, math.log1p(math.exp(-3)))


@LAWS
@given(st.integers(2, 9), st.integers(0, 9), seeds)
def test_splits_add_up(n: int, cut: int, seed: int) -> None:
    given_scores = scores(seed, n)
    label_weights = torch.rand(n, generator=torch.Generator().manual_seed(seed % 1000))
    offset = (torch.stack(given_scores[2:]) - torch.stack(given_scores[:2])).mean()

    def run(part: slice, **counts: Any) -> tuple[float, Tensor]:
        student = torch.stack(given_scores[2:])[:, part].clone().requires_grad_()
        teacher = (x[part] for x in given_scores[:2])
        loss = distill_loss(*teacher, *student, label_weights=label_weights[part], **ALL, **counts)
        loss.backward()
        assert student.grad is not None
        return float(loss.detach()), student.grad

    whole, slope = run(slice(None))
    parts = [run(part, num_pairs=n, score_offset=offset) for part in (slice(0, cut), slice(cut, n))]
    close(parts[0][0] + parts[1][0], whole, rtol=1e-4)
    close(torch.cat([part[1] for part in parts], dim=1), slope.double().numpy(), rtol=1e-4, atol=1e-5)
    own = float(offset)
    close(run(slice(None), score_offset=own)[0], whole)


def test_order_does_not_matter() -> None:
    given_scores = scores(4)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    close(distill_loss(*(x[order] for x in given_scores), **ALL), float(distill_loss(*given_scores, **ALL)))


def test_the_teacher_is_detached_and_the_offset_too() -> None:
    leaves = [x.clone().requires_grad_() for x in scores(5)]
    offset = torch.zeros((), requires_grad=True)
    distill_loss(*leaves, score_offset=offset, **ALL).backward()
    assert leaves[0].grad is None
    assert leaves[1].grad is None
    assert offset.grad is None
    assert leaves[2].grad is not None
    assert leaves[3].grad is not None


def test_no_pairs_give_zero_that_can_be_differentiated() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    out = distill_loss(torch.zeros(0), torch.zeros(0), nothing, nothing, **ALL)
    out.backward()
    assert float(out.detach()) == 0.0
    close(preference_kl(torch.zeros(0), torch.zeros(0), num_pairs=5), 0.0)


def test_low_precision_is_computed_in_float32() -> None:
    low = [x.bfloat16() for x in scores(6)]
    out = distill_loss(*low, **ALL)
    assert out.dtype == torch.float32
    assert torch.equal(out, distill_loss(*(x.float() for x in low), **ALL))


def test_wrong_inputs_are_refused() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="student_margins has shape"):
        preference_kl(x, x[:2])
    with pytest.raises(ValueError, match=r"\[P\]"):
        preference_kl(x[None], x[None])
    with pytest.raises(TypeError, match="floating"):
        preference_kl(x.long(), x)
    with pytest.raises(ValueError, match="student_rejected has shape"):
        distill_loss(x, x, x, x[:2], **ALL)
    with pytest.raises(ValueError, match="weights has shape"):
        distill_loss(x, x, x, x, label_weights=x[:2], **ALL)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            distill_loss(x, x, x, x, temperature=temperature, **ALL)
    for name in ALL:
        with pytest.raises(ValueError, match=name):
            distill_loss(x, x, x, x, **(ALL | {name: -0.1}))

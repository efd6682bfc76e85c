"""Laws of the engine: real schedule sizes, clipping, no step that is not finite, state that goes back bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from training.engine import Engine, EngineSettings, schedule


def parameters(seed: int = 1) -> dict[str, nn.Parameter]:
    draws = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (4, 3), "vector": (5,), "scalar": ()}
    return {name: nn.Parameter(torch.randn(shape, generator=draws)) for name, shape in shapes.items()}


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(**{"learning_rate": 0.1, "total_steps": 10, "weight_decay": 0.1} | changes)


def push(engine: Engine, step: int, scale: float = 1.0) -> None:
    """Gradients of a step, from its number alone."""
    draws = torch.Generator().manual_seed(100 + step)
    for parameter in engine.parameters.values():
        parameter.grad = scale * torch.randn(parameter.shape, generator=draws)


def snapshot(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.parameters.items()} | engine.tensors()


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@given(total=st.integers(1, 200), warmup=st.floats(0, 1))
def test_a_schedule_rises_then_holds_or_falls(kind, total, warmup):
    wanted = settings(total_steps=total, warmup_ratio=warmup, scheduler=kind)
    rates = [schedule(wanted, step) for step in range(total)]
    rising = math.ceil(warmup * total)
    assert all(0 < rate <= 1 for rate in rates), "a step without a rate is a step wasted"
    assert rates[:rising] == pytest.approx([(step + 1) / rising for step in range(rising)])
    rest = rates[rising:]
    assert all(a >= b for a, b in itertools.pairwise(rest))
    if rest:
        assert rest[0] == 1.0
        assert kind != "constant" or rest[-1] == 1.0
    assert kind == "constant" or schedule(wanted, total) <= 1e-9 or rising >= total
    assert schedule(wanted, 10 * total) >= 0


def test_schedules_by_hand():
    linear = settings(total_steps=10, warmup_ratio=0.2, scheduler="linear")
    assert [schedule(linear, s) for s in (0, 1, 2, 6, 9)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.125])
    cosine = settings(total_steps=8, scheduler="cosine")
    assert [schedule(cosine, s) for s in (0, 2, 4)] == pytest.approx([1.0, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5])


def test_the_rate_is_that_of_the_schedule_and_the_guards():
    engine = Engine(parameters(), settings(scheduler="linear"))
    seen = []
    for step in range(4):
        if step == 2:
            engine.lr_scale = 0.5
        push(engine, step)
        seen.append(engine.step().learning_rate)
    assert seen == pytest.approx([0.1, 0.09, 0.04, 0.035])
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.035)


def test_one_step_is_adamw_by_hand():
    """Loshchilov and Hutter 2019, algorithm 2, written out for the first two steps."""
    engine = Engine(parameters(), settings(max_grad_norm=1e9))
    expected = {name: p.detach().double().clone() for name, p in engine.parameters.items()}
    m = {name: torch.zeros_like(p) for name, p in expected.items()}
    v = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step in (1, 2):
        push(engine, step)
        for name, parameter in engine.parameters.items():
            gradient = parameter.grad.double()
            decay = 0.1 if parameter.ndim >= 2 else 0.0
            m[name] = 0.9 * m[name] + 0.1 * gradient
            v[name] = 0.95 * v[name] + 0.05 * gradient**2
            update = (m[name] / (1 - 0.9**step)) / ((v[name] / (1 - 0.95**step)).sqrt() + 1e-8)
            expected[name] = expected[name] * (1 - 0.1 * decay) - 0.1 * update
        engine.step()
    for name, parameter in engine.parameters.items():
        torch.testing.assert_close(parameter.detach().double(), expected[name], atol=1e-6, rtol=0)


def test_only_matrices_decay():
    engine = Engine(parameters(), settings(weight_decay=0.5))
    before = snapshot(engine)
    for parameter in engine.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    engine.step()
    after = snapshot(engine)
    torch.testing.assert_close(after["matrix"], before["matrix"] * (1 - 0.1 * 0.5))
    assert torch.equal(after["vector"], before["vector"])
    assert torch.equal(after["scalar"], before["scalar"])


def test_the_norm_is_clipped_and_told_before_clipping():
    engines = [Engine(parameters(), settings(max_grad_norm=1.0, weight_decay=0.0)) for _ in range(2)]
    for engine in engines:
        push(engine, 1, scale=50.0)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in engines[0].parameters.values()))
    for parameter in engines[1].parameters.values():
        parameter.grad /= norm
    reports = [engine.step() for engine in engines]
    assert reports[0].grad_norm == pytest.approx(norm, rel=1e-5)
    assert reports[1].grad_norm == pytest.approx(1.0, rel=1e-5)
    for name in engines[0].parameters:
        torch.testing.assert_close(
            engines[0].optimizer.state[engines[0].parameters[name]]["exp_avg"],
            engines[1].optimizer.state[engines[1].parameters[name]]["exp_avg"],
            atol=1e-6, rtol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float, first: bool):
    engine = Engine(parameters(), settings())
    if not first:
        push(engine, 1)
        engine.step()
    before = snapshot(engine)
    push(engine, 2)
    engine.parameters["vector"].grad[1] = poison
    report = engine.step()
    assert not report.applied
    assert not math.isfinite(report.grad_norm)
    assert_same(snapshot(engine), before)
    assert all(p.grad is None for p in engine.parameters.values())
    push(engine, 3)
    assert engine.step().applied
    assert all(torch.isfinite(t).all() for t in snapshot(engine).values())


def test_a_loss_that_is_not_finite_changes_nothing():
    engine = Engine(parameters(), settings())
    before = snapshot(engine)
    push(engine, 1)
    assert not engine.step(loss_is_finite=False).applied
    assert_same(snapshot(engine), before)
    assert engine.steps_done == 1, "a step thrown away is a step of the schedule all the same"


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_state_goes_back_bit_for_bit(cut: int):
    straight = Engine(parameters(), settings(scheduler="cosine", warmup_ratio=0.2))
    for step in range(cut):
        push(straight, step)
        straight.step()
    straight.lr_scale = 0.25
    other = Engine(parameters(seed=2), straight.settings)
    push(other, 99)
    other.step()  # whose own moments must not survive
    other.load(straight.tensors(), straight.state())
    with torch.no_grad():
        for name, parameter in other.parameters.items():
            parameter.copy_(straight.parameters[name])
    for step in range(cut, 6):
        reports = []
        for engine in (straight, other):
            push(engine, step)
            reports.append(engine.step())
        assert reports[0] == reports[1]
        assert_same(snapshot(straight), snapshot(other))


def test_loaded_moments_are_copies():
    engine = Engine(parameters(), settings())
    push(engine, 1)
    engine.step()
    kept = engine.tensors()
    copy = {name: tensor.clone() for name, tensor in kept.items()}
    engine.load(kept, engine.state())
    push(engine, 2)
    engine.step()
    assert_same(kept, copy)


def test_adding_microbatches_is_the_whole_batch():
    """A mean over a global count: any split gives the gradient of the whole."""
    draws = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn((12, 3), generator=draws), torch.randn((12, 4), generator=draws)
    gradients = []
    for split in ([12], [5, 7], [1] * 12):
        weights = parameters()
        start = 0
        for size in split:
            rows = slice(start, start + size)
            loss = (inputs[rows] @ weights["matrix"].T - targets[rows]).square().sum() / 12
            loss.backward()
            start += size
        gradients.append(weights["matrix"].grad)
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-6, rtol=0)


def test_an_engine_without_matrices_or_vectors():
    for name in ("matrix", "scalar"):
        engine = Engine({name: parameters()[name]}, settings())
        push(engine, 1)
        assert engine.step().applied

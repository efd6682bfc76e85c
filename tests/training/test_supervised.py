"""The supervised loop on a task made by hand: order, the best state, steps thrown away, failing runs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from configs.schema.supervised import SupervisedConfig
from tests.training.forks import KILLED, kill_at_call, run_forked
from training.checkpoint import CheckpointFolder
from training.context import StageContext
from training.contract import METRICS, StageSpec
from training.errors import StageError
from training.metrics import Mean
from training.recorder import Recorder, metric_series, read_lines
from training.supervised import _Order, fit
from training.world import World


class Line:
    """A network with the interface that the loop uses: y = a x + b."""

    def __init__(self) -> None:
        self.weights = {"a": nn.Parameter(torch.zeros(1, 1)), "b": nn.Parameter(torch.zeros(1))}

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.weights

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.weights.items():
            parameter.copy_(tensors[name])


class LineTask:
    """Least squares; `poison` items have no finite loss, `looks` replace the validation losses."""

    def __init__(self, count: int = 20, poison: set[int] = frozenset(), looks: list[float] | None = None) -> None:
        self.network = Line()
        self.names = [f"row-{i}" for i in range(count)]
        self.sizes = [(1, 1 + i % 4) for i in range(count)]
        self.x = torch.linspace(-1, 1, count)
        self.y = 3 * self.x - 1
        self.poison, self.looks, self.seen = set(poison), looks, []

    def count(self, items: list[int]) -> float:
        return float(len(items))

    def loss(self, items: list[int], count: float) -> tuple[torch.Tensor, dict[str, Mean]]:
        self.seen.append(sorted(items))
        rows = torch.tensor(items)
        error = self.network.weights["a"][0, 0] * self.x[rows] + self.network.weights["b"][0] - self.y[rows]
        if self.poison & set(items):
            error = error * math.nan
        loss = error.square().sum() / count
        return loss, {"loss": Mean(float(loss.detach()) * count, float(len(items)))}

    def validate(self) -> dict[str, float]:
        if self.looks is not None:
            return {"validation_loss": self.looks.pop(0)} if self.looks else {}
        a, b = (float(p.detach()) for p in self.network.weights.values())
        return {"validation_loss": (a - 3) ** 2 + (b + 1) ** 2}


def config(**changes: Any) -> SupervisedConfig:
    given = {
        "epochs": 2, "batch_size": 6, "learning_rate": 0.3, "eval_every": 100, "checkpoint_every": 100,
        "lr_scheduler": "constant", "warmup_ratio": 0.0, "max_tokens_per_microbatch": 1000,
    }  # fmt: skip
    return SupervisedConfig(**given | changes)


def context(directory: Path, seed: int = 1) -> StageContext:
    directory.mkdir(parents=True, exist_ok=True)
    spec = StageSpec("sft", "n", "h", seed, {})
    return StageContext(directory, spec, Recorder(directory / METRICS))


def test_it_learns(tmp_path: Path):
    task = LineTask()
    report = fit(task, config(epochs=30), context(tmp_path), World())
    assert report.validation["validation_loss"] < 1e-2
    assert report.steps == report.applied == 90
    steps, losses = metric_series(tmp_path / METRICS, "loss")
    assert steps == list(range(90))
    assert losses[-1] < 0.01 * losses[0]


def test_the_gradient_is_the_mean_over_the_batch(tmp_path: Path):
    """Not its sum: the norm that is logged and clipped must not grow with the batch."""
    task = LineTask()
    fit(task, config(epochs=0.1, max_tokens_per_microbatch=9, max_grad_norm=1e9), context(tmp_path), World())
    rows = torch.tensor([i for items in task.seen for i in items])
    assert len(rows) == 6
    gradient = torch.stack([(-2 * task.x[rows] * task.y[rows]).mean(), (-2 * task.y[rows]).mean()])
    assert metric_series(tmp_path / METRICS, "grad_norm")[1] == pytest.approx([float(gradient.norm())], rel=1e-5)


@given(items=st.integers(1, 40), batch=st.integers(1, 12), epochs=st.floats(0.1, 3), seed=st.integers(0, 9))
def test_an_epoch_sees_each_row_at_most_once(items, batch, epochs, seed):
    order = _Order(items, config(batch_size=batch, epochs=epochs), seed, "sft")
    assert order.total_steps == max(1, round(epochs * order.steps_per_epoch))
    seen: dict[int, list[int]] = {}
    for step in range(order.total_steps):
        rows = order.items(step)
        assert len(rows) == min(batch, items)
        seen.setdefault(step // order.steps_per_epoch, []).extend(rows)
    for rows in seen.values():
        assert len(set(rows)) == len(rows)


def test_epochs_and_seeds_shuffle_differently():
    order = _Order(20, config(batch_size=20), 1, "sft")
    assert order.items(0) != order.items(1)
    assert order.items(0) == _Order(20, config(batch_size=20), 1, "sft").items(0)
    assert order.items(0) != _Order(20, config(batch_size=20), 2, "sft").items(0)
    assert order.items(0) != _Order(20, config(batch_size=20), 1, "reward").items(0)


def test_microbatches_add_up_to_the_whole_batch(tmp_path: Path):
    """Any budget gives the gradient of the whole batch: the weights agree to 1e-6 after every step."""
    ends = []
    for budget in (1000, 9, 4):
        task = LineTask()
        fit(task, config(max_tokens_per_microbatch=budget), context(tmp_path / str(budget)), World())
        ends.append((task.network.tensors(), metric_series(tmp_path / str(budget) / METRICS, "loss")[1]))
        assert (max(map(len, task.seen)) == 6) == (budget == 1000)
    for tensors, losses in ends[1:]:
        assert losses == pytest.approx(ends[0][1], abs=1e-6)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, ends[0][0][name], atol=1e-6, rtol=0)


def test_the_best_state_is_handed_on_not_the_last(tmp_path: Path):
    task = LineTask(looks=[0.5, 0.2, math.nan, 0.9, 0.2, 0.4])
    kept: list[dict[str, torch.Tensor]] = []
    look = task.validate
    task.validate = lambda: (kept.append(task.network.tensors()), look())[1]
    report = fit(task, config(eval_every=1), context(tmp_path), World())
    assert report.validation == {"validation_loss": 0.2}
    assert torch.equal(task.network.tensors()["a"], kept[1]["a"])
    assert not torch.equal(kept[1]["a"], kept[-1]["a"])


def test_without_held_out_rows_the_last_state_is_handed_on(tmp_path: Path):
    task = LineTask(looks=[])
    report = fit(task, config(), context(tmp_path), World())
    assert report.validation == {}
    assert task.network.tensors()["a"].abs() > 0


def test_a_step_that_is_not_finite_is_thrown_away_and_told(tmp_path: Path):
    task = LineTask(poison={3})
    report = fit(task, config(epochs=4), context(tmp_path), World())
    assert 0 < report.applied < report.steps
    lines = read_lines(tmp_path / METRICS)
    thrown = [line["step"] for line in lines if line.get("event") == "step_not_applied"]
    flagged = [line["step"] for line in lines if "loss" in line.get("nonfinite", [])]
    assert thrown == flagged
    assert len(thrown) == report.steps - report.applied
    assert all(torch.isfinite(t).all() for t in task.network.tensors().values())


def test_a_run_that_applied_no_step_fails(tmp_path: Path):
    task = LineTask(poison=set(range(20)))
    with pytest.raises(StageError, match="sft: no optimiser step was applied"):
        fit(task, config(), context(tmp_path), World())
    assert not task.network.tensors()["a"].any()


def test_no_rows_is_an_error_before_any_work(tmp_path: Path):
    with pytest.raises(StageError, match=r"no rows to train on(.|\n)*dropped rows"):
        fit(LineTask(count=0), config(), context(tmp_path), World())


def test_checkpoints_of_another_spec_are_not_gone_on_from(tmp_path: Path):
    """And they do not crowd out those of this one."""
    fit(LineTask(), config(epochs=8, checkpoint_every=5), context(tmp_path, seed=1), World())
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == [15, 20]
    fresh, other = LineTask(), LineTask()
    fit(fresh, config(epochs=4, checkpoint_every=5), context(tmp_path, seed=2), World())
    fit(other, config(epochs=4, checkpoint_every=5), context(tmp_path / "alone", seed=2), World())
    assert torch.equal(fresh.network.tensors()["a"], other.network.tensors()["a"])
    assert len(metric_series(tmp_path / METRICS, "loss")[0]) == 12
    found = CheckpointFolder(tmp_path / "checkpoints").latest()
    assert found.step == 10
    assert found.state["seed"] == 2


@pytest.mark.parametrize("at", [1, 2, 5, 6, 8])
def test_killed_at_a_step_and_run_again_is_the_same_run(tmp_path: Path, at: int):
    settings = config(epochs=4, checkpoint_every=2, eval_every=3)
    straight = LineTask()
    fit(straight, settings, context(tmp_path / "straight"), World())

    def dies() -> None:
        task = LineTask()
        task.loss = kill_at_call(at, task.loss)
        fit(task, settings, context(tmp_path / "killed"), World())

    assert run_forked(dies) == KILLED
    again = LineTask()
    fit(again, settings, context(tmp_path / "killed"), World())
    assert len(again.seen) == 12 - 2 * ((at - 1) // 2), "steps before the checkpoint were run again"
    assert torch.equal(again.network.tensors()["a"], straight.network.tensors()["a"])
    histories = [
        [{k: v for k, v in line.items() if k != "time"} for line in read_lines(tmp_path / name / METRICS)]
        for name in ("straight", "killed")
    ]
    assert histories[0] == histories[1]


def test_other_ranks_write_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = SimpleNamespace(
        rank=1, size=2, is_main=False, in_step=False, turns=World().turns, sum_=lambda t: t,
        gather=lambda item: [item], sum_gradients=lambda parameters: None, barrier=lambda: None,
        broadcast=lambda item: item, broadcast_=lambda tensor: tensor,
    )  # fmt: skip
    fit(LineTask(), config(checkpoint_every=1), context(tmp_path), world)
    assert not (tmp_path / "checkpoints").exists()

"""The supervised loop of sft, reward and distill: exact microbatches, the best validation state, exact resume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from configs.schema.supervised import SupervisedConfig
from training.checkpoint import Checkpoint, CheckpointFolder, group, prefixed
from training.context import StageContext
from training.engine import Engine, EngineSettings
from training.engines.choose import build_engine
from training.errors import StageError
from training.metrics import Mean, MeanTable
from training.models.batching import Size, microbatches
from training.models.network import Network
from training.seeding import torch_generator
from training.world import World


class SupervisedTask(Protocol):
    """What differs between the three stages."""

    network: Network

    @property
    def names(self) -> Sequence[str]:
        """A name for each item, for errors."""

    @property
    def sizes(self) -> Sequence[tuple[int, int] | Size]:
        """(rows, longest row) of each item, for microbatches."""

    def count(self, items: Sequence[int]) -> float:
        """What the loss of these items is divided by: tokens, pairs."""

    def loss(self, items: Sequence[int], count: float) -> tuple[torch.Tensor, dict[str, Mean]]:
        """Loss of a microbatch over the *global* count, and its metrics."""

    def validate(self) -> dict[str, float]:
        """Metrics on held-out rows; `validation_loss` decides which state is kept."""


@dataclass(frozen=True)
class FitReport:
    """What training came to: optimiser steps, those applied, and the best validation metrics."""

    steps: int
    applied: int
    validation: dict[str, float]


@dataclass
class _Progress:
    step: int = 0
    applied: int = 0
    best_loss: float = math.inf
    best_step: int = -1
    best_metrics: dict[str, float] | None = None
    best_tensors: dict[str, torch.Tensor] | None = None


def fit(task: SupervisedTask, config: SupervisedConfig, context: StageContext, world: World) -> FitReport:
    """Train to the end and leave the best validation state in the network.

    Raises StageError when there is nothing to train on, or when no step could be applied.
    """
    if not task.names:
        raise StageError(f"{context.spec.stage}: no rows to train on", "look at the validation report for dropped rows")
    order = _Order(len(task.names), config, context.spec.seed, context.spec.stage)
    settings = EngineSettings(
        learning_rate=config.learning_rate, total_steps=order.total_steps, weight_decay=config.weight_decay,
        warmup_ratio=config.warmup_ratio, scheduler=config.lr_scheduler, max_grad_norm=config.max_grad_norm,
    )  # fmt: skip
    engine = build_engine(task.network, settings, world)
    checkpoints = CheckpointFolder(context.checkpoints)
    progress = _resume(task, engine, checkpoints, context)
    while progress.step < order.total_steps:
        _train_step(task, engine, config, order.items(progress.step), progress, context, world)
        progress.step += 1
        last = progress.step == order.total_steps
        if last or progress.step % config.eval_every == 0:
            _look(task, progress, context, world)
        if not last and progress.step % config.checkpoint_every == 0:
            _save(task, engine, checkpoints, progress, context)
        world.barrier()
    if progress.applied == 0:
        raise StageError(f"{context.spec.stage}: no optimiser step was applied: every loss or gradient was not finite")
    if progress.best_tensors is not None:
        task.network.load_tensors(progress.best_tensors)
    return FitReport(progress.step, progress.applied, progress.best_metrics or {})


class _Order:
    """Which items an optimiser step sees: a fresh permutation each epoch, from a generator named after it."""

    def __init__(self, items: int, config: SupervisedConfig, seed: int, stage: str) -> None:
        self.count, self.batch, self.seed, self.stage = items, min(config.batch_size, items), seed, stage
        self.steps_per_epoch = max(1, items // self.batch)
        self.total_steps = max(1, round(config.epochs * self.steps_per_epoch))

    def items(self, step: int) -> list[int]:
        """Items of optimiser step `step` (0-based). A last, smaller batch of an epoch is left to the next epochs."""
        epoch, position = divmod(step, self.steps_per_epoch)
        generator = torch_generator(self.seed, f"{self.stage}/order/epoch={epoch}")
        permutation = torch.randperm(self.count, generator=generator).tolist()
        return list(permutation[position * self.batch : (position + 1) * self.batch])


def _train_step(
    task: SupervisedTask, engine: Engine, config: SupervisedConfig, items: list[int], progress: _Progress,
    context: StageContext, world: World,
) -> None:  # fmt: skip
    batches = microbatches(
        [task.sizes[i] for i in items], config.max_tokens_per_microbatch, [task.names[i] for i in items]
    )
    count = task.count(items)
    table = MeanTable()
    for turn in world.turns(batches):
        loss, metrics = task.loss([items[i] for i in turn.items], count)
        engine.backward(loss, turn)
        if turn.counts:
            table.add(metrics)
    metrics_now = table.reduce(world)
    report = engine.step(loss_is_finite=math.isfinite(metrics_now.get("loss", 0.0)))
    progress.applied += report.applied
    if not report.applied:
        context.recorder.event("step_not_applied", step=progress.step, reason="loss or gradient not finite")
    metrics_now |= {"grad_norm": report.grad_norm, "learning_rate": report.learning_rate}
    context.recorder.record(progress.step, metrics_now)
    context.recorder.progress(progress.step + 1, engine.settings.total_steps, loss=metrics_now["loss"])


def _look(task: SupervisedTask, progress: _Progress, context: StageContext, world: World) -> None:
    metrics = world.broadcast(task.validate())
    if not metrics:
        return
    context.recorder.record(progress.step - 1, metrics)
    loss = metrics["validation_loss"]
    if math.isfinite(loss) and loss < progress.best_loss:
        progress.best_loss, progress.best_step, progress.best_metrics = loss, progress.step, metrics
        progress.best_tensors = task.network.tensors()


def _save(
    task: SupervisedTask, engine: Engine, checkpoints: CheckpointFolder, progress: _Progress, context: StageContext
) -> None:
    """The main rank writes; where weights are spread the others give their parts."""
    if not (engine.world.is_main or engine.world.in_step):
        return
    tensors = prefixed("network", task.network.tensors()) | prefixed("optimizer", engine.tensors())
    if progress.best_tensors is not None:
        tensors |= prefixed("best", progress.best_tensors)
    state: dict[str, Any] = {
        "seed": context.spec.seed,
        "key": context.spec.key,
        "engine": engine.state(),
        "applied": progress.applied,
        "best": [progress.best_loss, progress.best_step, progress.best_metrics],
        "metrics_position": context.recorder.position(),
    }
    if engine.world.is_main:
        checkpoints.save(progress.step, tensors, state)


def _resume(task: SupervisedTask, engine: Engine, checkpoints: CheckpointFolder, context: StageContext) -> _Progress:
    checkpoint = checkpoints.latest()
    if checkpoint is None or checkpoint.state["key"] != context.spec.key:
        context.recorder.rewind(0)
        _tell_refused(checkpoints, context)
        return _Progress()
    context.recorder.rewind(checkpoint.state["metrics_position"])
    _tell_refused(checkpoints, context)
    task.network.load_tensors(group("network", checkpoint.tensors))
    engine.load(group("optimizer", checkpoint.tensors), checkpoint.state["engine"])
    return _restored(checkpoint)


def _tell_refused(checkpoints: CheckpointFolder, context: StageContext) -> None:
    for refused in checkpoints.refused:
        context.recorder.event("checkpoint_refused", reason=refused)


def _restored(checkpoint: Checkpoint) -> _Progress:
    best_loss, best_step, best_metrics = checkpoint.state["best"]
    return _Progress(
        step=checkpoint.step,
        applied=checkpoint.state["applied"],
        best_loss=best_loss,
        best_step=best_step,
        best_metrics=best_metrics,
        best_tensors=group("best", checkpoint.tensors) or None,
    )

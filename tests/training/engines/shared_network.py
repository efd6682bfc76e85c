"""A tiny network trained for some steps, on one rank or on several: what every way of sharing it must agree on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.training.forks import run_ranks
from training.checkpoint import group, prefixed
from training.engine import Engine, EngineSettings
from training.engines.choose import build_engine, load_spread
from training.models.backbone import Backbone, LoraSettings
from training.models.layout import Group, build_layout
from training.models.network import Network, ScalarHead
from training.process import STRATEGY, ZERO_STAGE
from training.world import World, current_world

SETTINGS = EngineSettings(
    learning_rate=1e-3, total_steps=8, weight_decay=0.1, warmup_ratio=0.25, scheduler="linear", max_grad_norm=0.2
)
# Of three microbatches the second of two ranks gets one: it must go in step all the same.
BATCHES = [[0, 1], [2], [3, 4]]


@dataclass(frozen=True)
class Case:
    """What is trained: an adapter or every weight; with a head, scores, and log-probs else."""

    folder: Path
    lora: bool
    head: bool
    checkpointing: bool = False
    dtype: torch.dtype = torch.float32


def build(case: Case, world: World) -> Network:
    """The same network on every rank, spread as the world says."""

    def load(place: torch.device) -> Backbone:
        loaded = Backbone.load(case.folder, device=place, dtype=case.dtype, gradient_checkpointing=case.checkpointing)
        if case.lora:
            loaded.add_adapter("one", LoraSettings(4, 8.0), seed=3)
            loaded.add_adapter("two", LoraSettings(2, 4.0), seed=4)
        return loaded

    backbone = load_spread(load, torch.device("cpu"), world)
    head = ScalarHead(backbone.hidden_size).initialise(5, "test") if case.head else None
    return Network(backbone, "one" if case.lora else None, head, trains_backbone=not case.lora)


def groups(step: int) -> list[Group]:
    """Five rows a step, of uneven lengths."""
    draws = torch.Generator().manual_seed(100 + step)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 200, (count,), generator=draws).tolist())

    return [Group(ids(2 + row), (ids(3 + (row * 2) % 5),)) for row in range(5)]


def loss_of(network: Network, rows: list[Group]) -> torch.Tensor:
    """A mean over the step's five rows, whatever part of them this is."""
    layout = build_layout(rows, "padded", 0)
    if network.head is not None:
        return (network.scores(layout) - 1.0).square().sum() / 5
    return -network.log_probs(layout).sum() / 20


def train(network: Network, engine: Engine, world: World, steps: range, poisoned: int = -1) -> list[float]:
    """Gradient norms before clipping, one a step; a step that was not applied is a NaN."""
    norms = []
    for step in steps:
        rows = groups(step)
        for turn in world.turns(BATCHES):
            loss = loss_of(network, [rows[i] for i in turn.items])
            engine.backward(loss * math.nan if step == poisoned and 3 in turn.items else loss, turn)
        report = engine.step()
        norms.append(report.grad_norm if report.applied else math.nan)
    return norms


def state_of(network: Network, engine: Engine, norms: list[float]) -> dict[str, torch.Tensor]:
    """All that must agree."""
    found = prefixed("network", network.tensors()) | prefixed("optimizer", engine.tensors())
    return found | {"norms": torch.tensor(norms, dtype=torch.float64)}


def on_one_rank(case: Case, steps: int = 5, poisoned: int = -1) -> dict[str, torch.Tensor]:
    """The truth: plain torch."""
    network, world = build(case, World()), World()
    engine = build_engine(network, SETTINGS, world)
    return state_of(network, engine, train(network, engine, world, range(steps), poisoned))


def on_two_ranks(
    strategy: dict[str, str], case: Case, file: Path, steps: int = 5, poisoned: int = -1, cut: int | None = None
) -> dict[str, torch.Tensor]:
    """The same on two ranks; with `cut` the state is put into a fresh network and engine there."""

    def work() -> None:
        world = current_world()
        network = build(case, world)
        engine = build_engine(network, SETTINGS, world)
        norms = train(network, engine, world, range(cut or steps), poisoned)
        if cut is not None:
            kept, counters = state_of(network, engine, norms), engine.state()
            if world.is_main:
                save_file(kept, file)
            world.barrier()
            network = build(case, world)
            engine = build_engine(network, SETTINGS, world)
            tensors = load_file(file)
            world.barrier()
            network.load_tensors(group("network", tensors))
            engine.load(group("optimizer", tensors), counters)
            norms += train(network, engine, world, range(cut, steps), poisoned)
        found = state_of(network, engine, norms)
        if world.is_main:
            save_file(found, file)

    assert spread_ranks(strategy, work) == [0, 0]
    return load_file(file)


def spread_ranks(strategy: dict[str, str], work: Callable[[], object], seconds: float = 180.0) -> list[int]:
    """`work` on two ranks that share their networks this way."""

    def chosen() -> None:
        os.environ.update(strategy)
        work()

    return run_ranks(2, chosen, seconds)


FSDP2 = {STRATEGY: "fsdp2"}
ZERO = {stage: {STRATEGY: "deepspeed", ZERO_STAGE: str(stage)} for stage in range(4)}


def worst_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], group_name: str) -> float:
    """The largest absolute difference in a group of tensors."""
    assert one.keys() == other.keys()
    return max(
        float((tensor.double() - other[name].double()).abs().max())
        for name, tensor in one.items()
        if name.startswith(group_name)
    )

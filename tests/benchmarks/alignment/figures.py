"""The figures of RESULTS.md: frontiers of gold against KL, and gold against proxy under over-optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tests.benchmarks.alignment.curves import by_variant, frontier
from tests.benchmarks.alignment.results import RunResult
from tests.benchmarks.alignment.variants import DPO_RATES, OVEROPTIMISE, dpo_name

NOISES = (0.0, 0.1, 0.25)
GRID = np.linspace(0.0, 0.3, 61)
FEWEST_SEEDS = 2
"""A line of one seed says nothing about a variant."""


def draw_frontiers(found: Sequence[RunResult], file: Path) -> None:
    """One panel a share of flipped labels: every measured point, and the mean over seeds of each method's frontier."""
    panels = [noise for noise in NOISES if by_variant(found, noise)]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.2), sharey=True, squeeze=False)
    for axis, noise in zip(axes[0], panels, strict=True):
        runs = by_variant(found, noise)
        rates = [dpo_name(rate) for rate in DPO_RATES]
        _draw(axis, runs, rates, "DPO, best of its rates", "tab:orange")
        _draw(axis, runs, ["offline", "weights", "replay", "best_random", "best_worst", "power"],
              "PPO on stored answers, best of its variants", "tab:grey")  # fmt: skip
        _draw(axis, runs, ["fresh"], "PPO, fresh samples, no filter", "tab:green")
        _draw(axis, runs, ["filtered"], "PPO, fresh samples, best + worst", "tab:purple")
        _draw(axis, runs, ["default"], "shipped default", "tab:blue")
        axis.set(title=f"{noise:.0%} of the labels flipped", xlabel="KL to the reference, nats a token", xlim=(0, 0.3))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("gold reward")
    axes[0][-1].legend(loc="lower right", fontsize=8)
    _write(figure, file)


def _draw(axis: Axes, runs: dict[str, dict[int, RunResult]], names: Sequence[str], label: str, colour: str) -> None:
    there = [name for name in names if name in runs]
    seeds = sorted({seed for name in there for seed in runs[name]})
    if len(seeds) < FEWEST_SEEDS:
        return
    curves = []
    for seed in seeds:
        points = [p for name in there if seed in runs[name] for p in [*runs[name][seed].points, runs[name][seed].final]]
        axis.scatter([p.kl_ref for p in points], [p.gold for p in points], s=5, alpha=0.25, color=colour)
        curves.append(frontier(points, GRID))
    if curves:
        axis.plot(GRID, np.mean(curves, axis=0), color=colour, label=f"{label} (n = {len(seeds)})")


def draw_overoptimisation(found: Sequence[RunResult], file: Path) -> None:
    """Gold and proxy over KL for runs without a brake, one panel a reward model; thin lines are seeds."""
    runs = by_variant(found, 0.1)
    there = [variant for variant in OVEROPTIMISE if variant.name in runs]
    if not there:
        return
    figure, axes = plt.subplots(1, len(there), figsize=(4.6 * len(there), 4.2), squeeze=False, sharey=True)
    for axis, variant in zip(axes[0], there, strict=True):
        of = runs[variant.name]
        for number, run in enumerate(of.values()):
            kl = [p.kl_ref for p in run.points]
            for values, colour, label in (
                ([p.gold for p in run.points], "tab:blue", "gold reward"),
                ([p.proxy for p in run.points], "tab:red", "reward model, standard deviations"),
            ):
                axis.plot(kl, values, color=colour, alpha=0.6, marker=".", label=label if number == 0 else None)
        axis.set(title=f"{variant.label} (n = {len(of)})", xlabel="KL to the reference, nats a token")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    _write(figure, file)


def _write(figure: plt.Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)

"""The pictures that a reviewer wants of a night, as matplotlib figures. Numbers in, figures out; no files.

All panels have one size, and two of them beside each other fit MLflow's column of text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = tuple[Sequence[int], Sequence[float]]
"""Steps and values."""

# Colour-blind safe (Okabe and Ito), one colour a model in every picture.
_COLOURS = {"reference": "#999999", "champion": "#0072B2", "challenger": "#D55E00"}
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_MOST_BINS = 24
_PANEL, _BETWEEN = (3.6, 2.8), 0.1
"""Inches, at 100 pixels each. A figure of two is wider by what stands between two figures of one in a line."""


def reward_and_kl(rewards: Mapping[str, Series], divergences: Mapping[str, Series], limit: float | None) -> Figure:
    """Reward, and beside it KL to the reference (nats a token), over optimiser steps; `limit`: the guard's KL."""
    figure, (left, right) = _figure(2)
    _draw(left, rewards, "reward")
    _draw(right, divergences, "nats a token")
    if limit is not None:
        right.axhline(limit, color="black", linestyle=":", linewidth=1, label=f"guard at {limit:g}")
        right.legend(loc="best", fontsize=8, frameon=False)
    left.set_title("Reward over training")
    right.set_title("KL to the reference over training")
    return figure


def calibration(bins: Sequence[Mapping[str, float]], title: str = "Calibration of the reward model") -> Figure:
    """Hit rate against confidence on held-out pairs; on the diagonal the model means what it says.

    A bin has `confidence` and `hit_rate` in [0.5, 1] and [0, 1], and `share` of the pairs (the size of the dot).
    """
    figure, (axes,) = _figure(1)
    axes.plot([0.5, 1.0], [0.5, 1.0], color="black", linestyle=":", linewidth=1, label="perfect")
    axes.scatter(
        [b["confidence"] for b in bins],
        [b["hit_rate"] for b in bins],
        s=[15 + 300 * b["share"] for b in bins],
        color=_LINES[0],
        alpha=0.75,
        label="held-out pairs (dot size: their share)",
    )
    axes.set_xlabel("confidence of the model")
    axes.set_ylabel("share of pairs in the right order")
    axes.set_title(title)
    axes.legend(loc="best", fontsize=8, frameon=False)
    return figure


def length_histogram(lengths: Mapping[str, Sequence[float]], unit: str = "words") -> Figure:
    """How long the answers are, by model (`reference`, `champion`, `challenger`), in the same bins."""
    figure, (axes,) = _figure(1)
    longest = math.ceil(max((max(values) for values in lengths.values() if len(values)), default=1.0))
    # Whole numbers a bin: lengths are counts, and bins of a fraction of one would show gaps that are none.
    width = math.ceil((longest + 1) / _MOST_BINS)
    for name, values in lengths.items():
        axes.hist(
            list(values),
            bins=range(0, longest + 1 + width, width),
            histtype="step",
            linewidth=1.8,
            color=_COLOURS.get(name),
            label=f"{name}, mean {sum(values) / max(1, len(values)):.1f}",
        )
    axes.set_xlabel(f"length of the answer ({unit})")
    axes.set_ylabel("answers")
    axes.set_title("Length of the answers")
    axes.legend(loc="best", fontsize=8, frameon=False)
    return figure


def gold_against_proxy(scores: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Each answer's gold reward over its reward-model score, by model: (proxy, gold). Crosses are the means.

    Over-optimisation shows as a cross that moved right but not up.
    """
    figure, (axes,) = _figure(1)
    for name, (proxy, gold) in scores.items():
        colour = _COLOURS.get(name)
        axes.scatter(proxy, gold, s=10, alpha=0.3, color=colour, linewidths=0)
        if len(proxy):
            mean = (sum(proxy) / len(proxy), sum(gold) / len(gold))
            axes.scatter(*mean, s=110, marker="X", color=colour, edgecolor="black", label=f"{name}, mean")
    axes.set_xlabel("reward model (proxy)")
    axes.set_ylabel("gold reward")
    axes.set_title("Gold reward against reward model")
    axes.legend(loc="best", fontsize=8, frameon=False)
    return figure


def _figure(panels: int) -> tuple[Figure, Any]:
    """A figure with its own canvas: pyplot's global state and the choice of a backend stay untouched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(panels * _PANEL[0] + (panels - 1) * _BETWEEN, _PANEL[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for one in axes:
        one.grid(alpha=0.25)
        one.title.set_fontsize(11)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw(axes: Any, lines: Mapping[str, Series], label: str) -> None:
    for (name, (steps, values)), colour in zip(lines.items(), _LINES, strict=False):
        few = len(steps) < 30
        axes.plot(steps, values, color=colour, label=name, linewidth=1.4, marker="o" if few else None, markersize=3)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel(label)
    if lines:
        axes.legend(loc="best", fontsize=8, frameon=False)

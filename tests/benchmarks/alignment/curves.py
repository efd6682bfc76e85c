"""Means with intervals over seeds, frontiers, and how much it took to get somewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from tests.benchmarks.alignment.results import Point, RunResult


@dataclass(frozen=True)
class Interval:
    """Mean over `n` seeds and its 95 % interval by Student's t."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if self.n < 2:
            return f"{self.mean:.3f} (n = {self.n})"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def signed(self) -> str:
        """With signs, for differences."""
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean and interval of a few independent values; NaN bounds for fewer than two."""
    found = np.asarray(values, dtype=np.float64)
    n, mean = len(found), float(found.mean()) if len(found) else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n)
    half = float(stats.t.ppf(0.5 + confidence / 2, n - 1) * found.std(ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def frontier(points: Sequence[Point], grid: Sequence[float]) -> np.ndarray:
    """Best gold that a curve reaches with at most each KL of `grid`, which rises: what that much drift can buy."""
    return np.maximum.accumulate([gold_at(points, limit) for limit in grid])


def within(result: RunResult, budget: float) -> RunResult:
    """The run as it was when a smaller budget was spent: its rounds do not depend on what came later.

    A round that has begun is finished, so up to a quarter more is let pass.
    """
    points = [p for p in result.points if p.seconds <= 1.25 * budget]
    at = (result.final.gold, result.final.kl_ref)
    final = next((p for p in points if (p.gold, p.kl_ref) == at), points[-1])
    keeps = result.budget <= budget or len(points) == len(result.points)
    return result if keeps else replace(result, budget=budget, points=points, final=final)


def gold_at(points: Sequence[Point], kl: float) -> float:
    """Gold that a curve reaches at this KL, linearly between its points in order of KL; its best below, beyond its end.

    Beyond the end the curve gets its best gold so far: the comparison favours it.
    """
    ordered = sorted(points, key=lambda p: p.kl_ref)
    xs, ys = [p.kl_ref for p in ordered], [p.gold for p in ordered]
    if kl >= xs[-1]:
        return max(ys)
    return float(np.interp(kl, xs, ys))


def needed(points: Sequence[Point], axis: str, target: float) -> float:
    """How much of `axis` (fresh, updates, seconds) a run took until gold first reached `target`; NaN if never."""
    for before, after in itertools.pairwise(points):
        if after.gold >= target:
            share = 1.0 if after.gold == before.gold else (target - before.gold) / (after.gold - before.gold)
            start, end = getattr(before, axis), getattr(after, axis)
            return float(start + max(0.0, min(1.0, share)) * (end - start))
    return math.nan


def by_variant(results: Sequence[RunResult], noise: float) -> dict[str, dict[int, RunResult]]:
    """variant -> seed -> run, at one share of flipped labels."""
    found: dict[str, dict[int, RunResult]] = {}
    for result in results:
        if math.isclose(result.noise, noise):
            found.setdefault(result.variant, {})[result.seed] = result
    return found

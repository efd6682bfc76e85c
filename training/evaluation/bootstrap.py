"""The one bootstrap engine: resample rows, read any statistic of the column means, give BCa intervals.

Alphabet: N samples (rows: prompts, pairs), K columns measured on each, R resamples. A statistic maps column means
`[..., K] -> [...]`, so means, ratios of sums and paired differences of either all use the same resampled rows.
Source: Efron & Tibshirani, An Introduction to the Bootstrap (1993), ch. 14: eq. 14.9-14.10 (interval), 14.14 (bias
correction), 14.15 (acceleration by the jackknife).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from training.errors import GateError

FloatArray = NDArray[np.float64]
Statistic = Callable[[FloatArray], FloatArray]
Bounds = tuple[float, float]

RESAMPLES = 2_000
UNDEFINED: Bounds = (float("nan"), float("nan"))
_CHUNK = 1 << 18  # drawn indices held at once: a few megabytes
_NORMAL = NormalDist()


def generator(seed: int, *names: str) -> np.random.Generator:
    """The generator of the draw called `names`: adding a metric never changes the interval of another."""
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


def as_sample(values: ArrayLike, name: str) -> FloatArray:
    """One float64 sample `[N]`. NaN and infinities are kept. Raises GateError naming it when it is not a flat list."""
    try:
        sample = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise GateError(f"{name}: not a list of numbers: {error}") from None
    if sample.ndim != 1 or sample.size == 0:
        raise GateError(f"{name}: needs a flat, non-empty list of numbers, one a prompt; got shape {sample.shape}")
    return sample


@dataclass(frozen=True)
class Bootstrap:
    """Column means of one sample: `mean` [K], `resampled` [R, K], leave-one-out `jackknife` [N, K] (empty if N < 2)."""

    mean: FloatArray
    resampled: FloatArray
    jackknife: FloatArray

    @classmethod
    def draw(cls, columns: FloatArray, rng: np.random.Generator, resamples: int = RESAMPLES) -> Bootstrap:
        """Resample the rows of `columns` [N, K] with replacement; all columns share them, so pairs stay pairs."""
        n = columns.shape[0]
        with np.errstate(invalid="ignore", over="ignore"):
            return cls(
                mean=columns.mean(axis=0),
                resampled=_resampled_means(columns, rng, resamples),
                jackknife=(columns.sum(axis=0) - columns) / (n - 1) if n > 1 else columns[:0],
            )

    def value(self, statistic: Statistic) -> float:
        """The statistic of the sample itself; NaN and infinities come through."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            return float(statistic(self.mean))

    def intervals(self, statistic: Statistic, levels: Sequence[float]) -> list[Bounds]:
        """One interval a two-sided level."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            influence = _influence(statistic(self.jackknife))
            return bca_intervals(self.value(statistic), statistic(self.resampled), influence, levels)


def unpaired_intervals(
    first: Bootstrap, second: Bootstrap, statistic: Statistic, levels: Sequence[float]
) -> tuple[float, list[Bounds]]:
    """Value and intervals of `statistic(first) - statistic(second)`, two samples drawn independently of each other."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        value = float(statistic(first.mean) - statistic(second.mean))
        replicates = statistic(first.resampled) - statistic(second.resampled)
        influence = np.concatenate([_influence(statistic(first.jackknife)), -_influence(statistic(second.jackknife))])
    return value, bca_intervals(value, replicates, influence, levels)


def bca_intervals(value: float, replicates: FloatArray, influence: FloatArray, levels: Sequence[float]) -> list[Bounds]:
    """Bias-corrected accelerated intervals, nested by level and always holding `value`.

    `replicates` [R]: the statistic on the resamples. `influence` [N]: mean of the leave-one-out values minus each.
    Fewer than two samples, or anything that is not finite, has no interval: both bounds are NaN.
    """
    finite = np.isfinite(value) and bool(np.isfinite(replicates).all() and np.isfinite(influence).all())
    if influence.size < 2 or not finite:
        return [UNDEFINED for _ in levels]
    bias, acceleration = _bias_correction(value, replicates), _acceleration(influence)
    bounds = []
    for level in levels:
        ends = [_adjusted(end, bias, acceleration) for end in ((1 - level) / 2, (1 + level) / 2)]
        low, high = np.quantile(replicates, ends)
        # a strong bias and a low level could leave the value itself outside
        bounds.append((min(value, float(low)), max(value, float(high))))
    return bounds


def _resampled_means(columns: FloatArray, rng: np.random.Generator, resamples: int) -> FloatArray:
    n, k = columns.shape
    means = np.empty((resamples, k))
    step = max(1, _CHUNK // n)
    for start in range(0, resamples, step):
        rows = rng.integers(0, n, size=(min(step, resamples - start), n))
        for column in range(k):
            means[start : start + step, column] = columns[rows, column].mean(axis=1)
    return means


def _influence(leave_one_out: FloatArray) -> FloatArray:
    return leave_one_out.mean() - leave_one_out if leave_one_out.size else leave_one_out


def _bias_correction(value: float, replicates: FloatArray) -> float:
    below = (np.sum(replicates < value) + 0.5 * np.sum(replicates == value)) / replicates.size
    # a value outside all resamples would be an infinite correction: stop at half a resample
    edge = 0.5 / replicates.size
    return _NORMAL.inv_cdf(float(np.clip(below, edge, 1 - edge)))


def _acceleration(influence: FloatArray) -> float:
    largest = float(np.abs(influence).max())
    if largest == 0:
        return 0.0
    scaled = influence / largest  # the powers of very small numbers would vanish
    return float(np.sum(scaled**3) / (6 * np.sum(scaled**2) ** 1.5))


def _adjusted(probability: float, bias: float, acceleration: float) -> float:
    shifted = bias + _NORMAL.inv_cdf(probability)
    bend = 1 - acceleration * shifted
    if bend <= 0:
        return 1.0 if shifted > 0 else 0.0
    return _NORMAL.cdf(bias + shifted / bend)

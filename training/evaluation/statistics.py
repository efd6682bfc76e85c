"""Numbers with their uncertainty: means, paired and unpaired differences, win rates, rank agreement.

Nothing here hides a NaN or an infinity: it comes through in the value, and the bounds are then NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from training.errors import GateError
from training.evaluation.bootstrap import (
    RESAMPLES,
    UNDEFINED,
    Bootstrap,
    Bounds,
    FloatArray,
    as_sample,
    generator,
    unpaired_intervals,
)


@dataclass(frozen=True)
class WithInterval:
    """A number, its interval at `confidence` (two-sided) and the samples it rests on. Bounds are NaN where n < 2."""

    value: float
    low: float
    high: float
    confidence: float
    n: int


def mean_with_interval(
    values: ArrayLike, *, seed: int, confidence: float = 0.95, resamples: int = RESAMPLES
) -> WithInterval:
    """Mean of one sample [N] with its BCa bootstrap interval."""
    sample = as_sample(values, "values")
    drawn = Bootstrap.draw(sample[:, None], generator(seed, "mean"), resamples)
    return _with_interval(drawn.value(_first), drawn.intervals(_first, [confidence])[0], confidence, sample.size)


def paired_difference(
    challenger: ArrayLike, baseline: ArrayLike, *, seed: int, confidence: float = 0.95, resamples: int = RESAMPLES
) -> WithInterval:
    """Mean of challenger minus baseline, both measured on the same N prompts: whole prompts are resampled."""
    left, right = paired_samples(challenger, baseline)
    with np.errstate(invalid="ignore"):
        difference = left - right
    drawn = Bootstrap.draw(difference[:, None], generator(seed, "paired difference"), resamples)
    return _with_interval(drawn.value(_first), drawn.intervals(_first, [confidence])[0], confidence, left.size)


def unpaired_difference(
    first: ArrayLike, second: ArrayLike, *, seed: int, confidence: float = 0.95, resamples: int = RESAMPLES
) -> WithInterval:
    """Mean of `first` minus mean of `second`, two samples of different things. `n` is the smaller one's."""
    left, right = as_sample(first, "first"), as_sample(second, "second")
    value, bounds = unpaired_intervals(
        Bootstrap.draw(left[:, None], generator(seed, "unpaired", "first"), resamples),
        Bootstrap.draw(right[:, None], generator(seed, "unpaired", "second"), resamples),
        _first,
        [confidence],
    )
    n = min(left.size, right.size)
    return _with_interval(value, bounds[0] if n > 1 else UNDEFINED, confidence, n)


def win_points(challenger: ArrayLike, opponent: ArrayLike) -> FloatArray:
    """Per prompt [N]: 1 where the challenger scored higher, one half for a tie, else 0; NaN where a score is not."""
    left, right = paired_samples(challenger, opponent)
    points = np.where(left > right, 1.0, np.where(left == right, 0.5, 0.0))
    return np.where(np.isfinite(left) & np.isfinite(right), points, np.nan)


def win_rate(challenger: ArrayLike, opponent: ArrayLike) -> float:
    """Share of prompts won, ties half; in [0, 1], or NaN as soon as one score is not finite."""
    return float(win_points(challenger, opponent).mean())


def wilson_interval(share: float, n: int, confidence: float = 0.95) -> Bounds:
    """Interval of a share of n trials (ties half are allowed: their variance is smaller).

    Wilson (1927). Unlike the bootstrap it does not shrink to a point when all trials agree. NaN where n < 2.
    """
    if n < 2 or not np.isfinite(share):
        return UNDEFINED
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * float(np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)))
    # the exact bounds of 0 of n and n of n are 0 and 1; rounding must not leave the value outside
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def kendall_tau(first: ArrayLike, second: ArrayLike) -> float:
    """Rank agreement of two scorings of the same N answers (tau-b, ties corrected), in [-1, 1].

    NaN where a score is not finite or one side is constant. Kendall (1945).
    """
    # scipy takes a third of a second to import, and few callers need it
    from scipy.stats import kendalltau

    left, right = paired_samples(first, second)
    if left.size < 2 or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return float("nan")
    return float(kendalltau(left, right).statistic)


def paired_samples(challenger: ArrayLike, baseline: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Both as [N]; raises GateError when they are not measured on the same number of prompts."""
    left, right = as_sample(challenger, "challenger"), as_sample(baseline, "baseline")
    if left.size != right.size:
        raise GateError(
            f"paired samples differ in length: {left.size} and {right.size}",
            "score both models on the same prompts, in the same order",
        )
    return left, right


def _first(means: FloatArray) -> FloatArray:
    column: FloatArray = means[..., 0]
    return column


def _with_interval(value: float, bounds: Bounds, confidence: float, n: int) -> WithInterval:
    return WithInterval(value, *bounds, confidence, n)

"""From per-prompt values to a metric of the report: estimates, paired differences, intervals, slices."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from training.errors import GateError
from training.evaluation.bootstrap import (
    RESAMPLES,
    Bootstrap,
    Bounds,
    FloatArray,
    Statistic,
    as_sample,
    generator,
    unpaired_intervals,
)
from training.evaluation.report_records import Estimate, Interval, Measurement, MetricReport, SliceMeasurement
from training.evaluation.statistics import wilson_interval, win_points

Members = NDArray[np.bool_]


class RatioValues(NamedTuple):
    """A ratio of sums over N prompts, e.g. summed token KL over token counts."""

    numerators: ArrayLike
    denominators: ArrayLike


@dataclass(frozen=True)
class MetricBuilder:
    """Builds the metrics of one set of prompts. Same inputs and seed, same report.

    seed: root of the resampling; each metric and slice draws from its own generator.
    confidence: level, or levels, of the intervals (see GatesConfig.confidence_levels).
    slices: name -> bool [N], True for the prompts that belong (see prompt_slices.slice_members).
    """

    seed: int
    confidence: float | Sequence[float] = 0.95
    resamples: int = RESAMPLES
    slices: Mapping[str, Members] = field(default_factory=dict)

    def mean(
        self,
        name: str,
        challenger: ArrayLike,
        champion: ArrayLike | None = None,
        reference: ArrayLike | None = None,
        *,
        unit: str = "",
        proportion: bool = False,
    ) -> MetricReport:
        """Mean of one value a prompt [N], the same prompts in the same order for every model.

        `proportion`: the values are 0 or 1 (ties one half): the models' own intervals are then Wilson's.
        """
        models = _columns(name, {"challenger": challenger, "champion": champion, "reference": reference})
        return self._metric(name, unit, models, _mean, proportion)

    def ratio(
        self,
        name: str,
        challenger: RatioValues,
        champion: RatioValues | None = None,
        reference: RatioValues | None = None,
        *,
        unit: str = "",
        transform: Callable[[FloatArray], FloatArray] | None = None,
    ) -> MetricReport:
        """Sum over sum, e.g. KL per token; `transform=np.exp` of summed loss over tokens is perplexity."""
        given = {"challenger": challenger, "champion": champion, "reference": reference}
        flat = {
            f"{model}.{part}": None if values is None else getattr(values, part)
            for model, values in given.items()
            for part in RatioValues._fields
        }
        parts = _columns(name, flat)
        models = {
            m: np.hstack([parts[f"{m}.{part}"] for part in RatioValues._fields])
            for m, values in given.items()
            if values is not None
        }
        return self._metric(name, unit, models, _ratio(transform), proportion=False)

    def win_rate(self, name: str, challenger: ArrayLike, opponent: ArrayLike, *, unit: str = "") -> MetricReport:
        """Share of prompts [N] on which the challenger scores higher than the opponent, ties half."""
        return self.mean(name, win_points(challenger, opponent), unit=unit, proportion=True)

    def gap(self, name: str, first: ArrayLike, second: ArrayLike, *, unit: str = "") -> MetricReport:
        """Mean of `first` minus mean of `second`, samples of different things (training and validation prompts)."""
        left, right = as_sample(first, f"{name}: first"), as_sample(second, f"{name}: second")
        drawn = [
            Bootstrap.draw(sample[:, None], generator(self.seed, name, side), self.resamples)
            for sample, side in ((left, "first"), (right, "second"))
        ]
        value, bounds = unpaired_intervals(drawn[0], drawn[1], _mean, self.levels)
        both = np.concatenate([left, right])[:, None]
        n = min(left.size, right.size)
        overall = Measurement(challenger=self._estimate(value, bounds if n > 1 else [], both, n))
        return MetricReport(name=name, unit=unit, overall=overall)

    @property
    def levels(self) -> tuple[float, ...]:
        """Levels of the intervals, ascending."""
        given = (self.confidence,) if isinstance(self.confidence, int | float) else self.confidence
        return tuple(sorted({float(level) for level in given}))

    def _metric(
        self, name: str, unit: str, models: Mapping[str, FloatArray], statistic: Statistic, proportion: bool
    ) -> MetricReport:
        size = models["challenger"].shape[0]
        parts = []
        for label, members in self.slices.items():
            if members.shape != (size,) or members.dtype != np.bool_:
                raise GateError(f"metric {name}: slice {label} needs one true or false a prompt ({size} of them)")
            if members.any():  # a slice that never appeared is absent from the report, and the gate sees that
                inside = {model: columns[members] for model, columns in models.items()}
                measurement = self._measure(f"{name}/{label}", inside, statistic, proportion)
                parts.append(SliceMeasurement(name=label, measurement=measurement))
        overall = self._measure(name, models, statistic, proportion)
        return MetricReport(name=name, unit=unit, overall=overall, slices=tuple(parts))

    def _measure(
        self, draw_name: str, models: Mapping[str, FloatArray], statistic: Statistic, proportion: bool
    ) -> Measurement:
        width = models["challenger"].shape[1]
        drawn = Bootstrap.draw(np.hstack(list(models.values())), generator(self.seed, draw_name), self.resamples)
        at = {model: slice(i * width, (i + 1) * width) for i, model in enumerate(models)}
        estimates: dict[str, Estimate] = {}
        for model, columns in models.items():
            own = _on(statistic, at[model])
            value, bounds = drawn.value(own), drawn.intervals(own, self.levels)
            if proportion:
                bounds = [wilson_interval(value, columns.shape[0], level) for level in self.levels]
            estimates[model] = self._estimate(value, bounds, columns)
            if model != "challenger":
                change = _difference(statistic, at["challenger"], at[model])
                both = np.hstack([models["challenger"], columns])
                estimates[f"versus_{model}"] = self._estimate(
                    drawn.value(change), drawn.intervals(change, self.levels), both
                )
        return Measurement(**estimates)

    def _estimate(self, value: float, bounds: Sequence[Bounds], rows: FloatArray, n: int | None = None) -> Estimate:
        n = rows.shape[0] if n is None else n
        intervals = tuple(
            Interval(confidence=level, low=low, high=high)
            for level, (low, high) in zip(self.levels, bounds, strict=False)
        )
        return Estimate(
            value=value,
            n=n,
            nonfinite=int((~np.isfinite(rows)).any(axis=1).sum()),
            values_digest=values_digest(rows),
            # one sample has no spread, so no interval: leaving it out says so, where NaN would read as damage
            intervals=intervals if n > 1 else (),
        )


def exact_metric(
    name: str,
    challenger: float,
    champion: float | None = None,
    reference: float | None = None,
    *,
    n: int,
    unit: str = "",
) -> MetricReport:
    """A number known without sampling error, resting on n samples. No interval: its rules say `confidence: null`."""

    def known(value: float) -> Estimate:
        return Estimate(value=float(value), n=n, nonfinite=0, values_digest="", intervals=())

    overall = Measurement(
        challenger=known(challenger),
        champion=None if champion is None else known(champion),
        reference=None if reference is None else known(reference),
        versus_champion=None if champion is None else known(challenger - champion),
        versus_reference=None if reference is None else known(challenger - reference),
    )
    return MetricReport(name=name, unit=unit, overall=overall)


def build_metric(
    name: str,
    challenger_values: ArrayLike,
    champion_values: ArrayLike | None = None,
    reference_values: ArrayLike | None = None,
    *,
    seed: int,
    confidence: float | Sequence[float] = 0.95,
    slices: Mapping[str, Members] | None = None,
    unit: str = "",
) -> MetricReport:
    """`MetricBuilder.mean` in one call: values [N] of each model on the same prompts; GateError on other shapes."""
    builder = MetricBuilder(seed=seed, confidence=confidence, slices=slices or {})
    return builder.mean(name, challenger_values, champion_values, reference_values, unit=unit)


def values_digest(values: FloatArray) -> str:
    """sha256 of the values' bytes, one NaN and one zero for all."""
    plain = np.where(np.isnan(values), np.nan, values) + 0.0
    return hashlib.sha256(np.ascontiguousarray(plain, dtype="<f8").tobytes()).hexdigest()


def _columns(name: str, samples: Mapping[str, ArrayLike | None]) -> dict[str, FloatArray]:
    columns = {
        who: as_sample(values, f"metric {name}, {who}")[:, None]
        for who, values in samples.items()
        if values is not None
    }
    lengths = {who: column.shape[0] for who, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise GateError(
            f"metric {name}: values are not of the same prompts: {lengths}",
            "score every model on the same prompts, in the same order",
        )
    return columns


def _mean(means: FloatArray) -> FloatArray:
    column: FloatArray = means[..., 0]
    return column


def _ratio(transform: Callable[[FloatArray], FloatArray] | None) -> Statistic:
    def statistic(means: FloatArray) -> FloatArray:
        quotient: FloatArray = means[..., 0] / means[..., 1]
        return quotient if transform is None else transform(quotient)

    return statistic


def _on(statistic: Statistic, columns: slice) -> Statistic:
    return lambda means: statistic(means[..., columns])


def _difference(statistic: Statistic, challenger: slice, baseline: slice) -> Statistic:
    return lambda means: statistic(means[..., challenger]) - statistic(means[..., baseline])

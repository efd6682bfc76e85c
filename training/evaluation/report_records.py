"""What an evaluation report consists of. `training.evaluation.report` builds, writes and reads it."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from training.evaluation.records import Number, Record

Count = Annotated[int, Field(ge=0)]
Level = Annotated[float, Field(gt=0.0, lt=1.0)]
LEVEL_SLACK = 1e-9  # 0.95 computed in two ways is still 0.95


class Interval(Record):
    """A two-sided confidence interval."""

    confidence: Level
    """Its level, e.g. 0.95."""
    low: Number
    """Lower bound, in the metric's unit."""
    high: Number
    """Upper bound, in the metric's unit."""

    @model_validator(mode="after")
    def _in_order(self) -> Interval:
        if self.low > self.high:
            raise ValueError(f"interval upside down: low {self.low} is above high {self.high}")
        return self


class Estimate(Record):
    """One number, what it rests on, and how sure it is."""

    value: Number
    """In the metric's unit."""
    n: Count
    """Samples (prompts, pairs) it rests on."""
    nonfinite: Count
    """How many of those were NaN or infinite; above 0 the value is not to be trusted."""
    values_digest: str
    """sha256 of the per-sample values (float64, little-endian); empty for an exact number without samples."""
    intervals: tuple[Interval, ...]
    """One a level, ascending; none where fewer than two samples, or an exact number, leave none to give."""

    @model_validator(mode="after")
    def _intervals_hold_the_value(self) -> Estimate:
        levels = [interval.confidence for interval in self.intervals]
        if levels != sorted(set(levels)):
            raise ValueError(f"intervals must ascend by level, each level once; got {levels}")
        for interval in self.intervals:
            if self.value < interval.low or self.value > interval.high:
                raise ValueError(f"value {self.value} lies outside its interval [{interval.low}, {interval.high}]")
        for inner, outer in pairwise(self.intervals):
            if outer.low > inner.low or outer.high < inner.high:
                raise ValueError(f"the {outer.confidence} interval is narrower than the {inner.confidence} interval")
        return self

    def interval(self, confidence: float) -> Interval | None:
        """The narrowest interval of at least that level: never a more confident answer than was asked for."""
        wide_enough = [i for i in self.intervals if i.confidence >= confidence - LEVEL_SLACK]
        return wide_enough[0] if wide_enough else None


class Measurement(Record):
    """One metric of the three models on the same samples."""

    challenger: Estimate
    """The policy that asks to be promoted."""
    champion: Estimate | None = None
    """The policy in production; null on the first version ever, or where the metric has none."""
    reference: Estimate | None = None
    """The policy before PPO; null where the metric has none."""
    versus_champion: Estimate | None = None
    """Challenger minus champion, paired by sample."""
    versus_reference: Estimate | None = None
    """Challenger minus reference, paired by sample."""


class SliceMeasurement(Record):
    """The same metric on part of the samples."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z_]*=")]
    """dimension=value, e.g. category=arithmetic."""
    measurement: Measurement


class MetricReport(Record):
    """One metric: over all samples, and in every slice."""

    name: Annotated[str, Field(min_length=1)]
    """As gate rules call it."""
    unit: str = ""
    """For readers: nats, tokens, ..."""
    overall: Measurement
    slices: tuple[SliceMeasurement, ...] = ()

    @model_validator(mode="after")
    def _slices_once(self) -> MetricReport:
        names = [part.name for part in self.slices]
        if len(set(names)) < len(names):
            raise ValueError(f"metric {self.name}: a slice appears twice")
        return self

    def slice(self, name: str) -> Measurement | None:
        """The measurement of one slice, or None where it never appeared."""
        return next((part.measurement for part in self.slices if part.name == name), None)


class ModelDigest(Record):
    """Which model took part."""

    name: str
    """For readers: a registry version or a stage's output."""
    sha256: Annotated[str, Field(min_length=1)]
    """Digest of its folder."""


class PromptOverlap(Record):
    """Rows that were removed from training, since their prompt is an evaluation prompt (`exact`) or nearly one (`near`;
    looked for where data.near_duplicate_threshold is set)."""

    exact: Count
    near: Count


class SampleAnswer(Record):
    """One prompt with the answers old beside new."""

    prompt_id: str
    prompt: str
    challenger: str
    champion: str | None = None
    reference: str | None = None
    challenger_reward: Number | None = None
    champion_reward: Number | None = None
    reference_reward: Number | None = None


class EvaluationReport(Record):
    """Champion, challenger and reference on the same frozen prompts, same seed, same reward model."""

    schema_version: Literal[1] = 1
    night: str
    """Name of the night."""
    seed: Annotated[int, Field(ge=0)]
    """Root seed of sampling and resampling."""
    prompt_set_digest: str
    """sha256 of the evaluation prompts' ids, in order."""
    prompt_count: Count
    challenger: ModelDigest
    champion: ModelDigest | None = None
    """Null on the first version ever."""
    reference: ModelDigest | None = None
    reward_model: ModelDigest | None = None
    """What scored all answers; null for a reward function."""
    overlap: PromptOverlap | None = None
    """Null where nobody has told, as in a measurement of the watch."""
    metrics: tuple[MetricReport, ...]
    samples: tuple[SampleAnswer, ...] = ()

    @model_validator(mode="after")
    def _metrics_once(self) -> EvaluationReport:
        names = [metric.name for metric in self.metrics]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"metrics reported twice: {', '.join(twice)}")
        return self

    def metric(self, name: str) -> MetricReport | None:
        """One metric, or None where the report has none of that name."""
        return next((metric for metric in self.metrics if metric.name == name), None)

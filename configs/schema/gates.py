"""The gate: rules a challenger must meet to replace the champion, as data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from configs.schema.base import NonNegative, Positive, Section, at_most

Direction = Literal["higher", "lower"]
Baseline = Literal["champion", "reference"]
Severity = Literal["block", "warn", "dry_run"]

Count = Annotated[int, Field(ge=2), at_most(1_000_000_000, "samples")]
"""Samples; an interval needs at least two."""
SliceName = Annotated[str, Field(pattern=r"^[a-z][a-z_]*=\S(.*\S)?$")]
RuleName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$", max_length=80)]
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_./-]*$", max_length=80)]

REPORT_LABEL = "report"
"""The gate's own check of the report (all numbers finite, the right models) goes under this name."""


class Amount(Section):
    """An amount of change. With both keys the stricter one holds."""

    absolute: NonNegative | None = None
    """In the metric's own unit."""
    relative: NonNegative | None = None
    """As a share of the absolute value of the baseline (0.05 is 5 %), so a negative baseline keeps the sense. With a
    baseline within gates.epsilon of 0 `absolute` holds instead; where that is not given, this same number is read in
    the metric's unit."""

    @model_validator(mode="after")
    def _something_given(self) -> Amount:
        if self.absolute is None and self.relative is None:
            raise ValueError("an amount needs a number: write e.g. 0.05, {absolute: 0.05} or {relative: 0.02}")
        return self


def _number_is_absolute(given: Any) -> Any:
    number = isinstance(given, int | float | str) and not isinstance(given, bool)
    return {"absolute": given} if number else given


AmountOrNumber = Annotated[Amount, BeforeValidator(_number_is_absolute, json_schema_input_type=float | Amount)]


class GateRule(Section):
    """One metric's limits. Every limit given must hold, over all prompts and in every slice named."""

    name: RuleName | None = None
    """How reports call the rule; null: the metric, with `_vs_champion` or `_vs_reference` where it compares."""
    metric: MetricName
    """A metric of the evaluation report, e.g. reward, kl_ref, win_rate, perplexity."""
    direction: Direction | None = None
    """Which way is better; required by max_regression and min_improvement, so that no sign is ever guessed."""
    baseline: Baseline = "champion"
    """What max_regression and min_improvement compare with. Comparisons with the champion are skipped on the first
    version ever; comparisons with the reference (the policy before PPO) hold on every night."""
    min: float | None = None
    """Lowest value allowed, in the metric's unit."""
    max: float | None = None
    """Highest value allowed, in the metric's unit."""
    max_regression: AmountOrNumber | None = None
    """How much worse than the baseline is still allowed: a number (metric's unit), {absolute: } or {relative: }."""
    min_improvement: AmountOrNumber | None = None
    """How much better than the baseline it must be, exclusive: 0 asks for any improvement above none."""
    min_n: Count = 30
    """Fewest samples (prompts, pairs) the number may rest on."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] | None = 0.95
    """Two-sided level of the interval whose worse bound must clear the limit; null judges the bare value, for exact
    metrics that have no interval."""
    slices: tuple[SliceName, ...] = ()
    """Slices that must hold too, `dimension=value` (e.g. category=arithmetic, source=hh, length=long), or
    `dimension=*` for every slice of that dimension. One that never appeared fails."""
    min_slice_n: Count = 20
    """Fewest samples in each of those slices."""
    needs_champion: bool = False
    """True for a metric that itself compares with the champion (win_rate): skipped on the first version ever."""
    severity: Severity = "block"
    """block: promotion needs it; warn: told, does not block; dry_run: tried out, told as such, does not block."""

    @model_validator(mode="after")
    def _limits_make_sense(self) -> GateRule:
        compares = self.compares
        if not compares and self.min is None and self.max is None:
            raise ValueError(
                f"gate rule on {self.metric} has no limit; write min, max, max_regression or min_improvement"
            )
        if compares and self.direction is None:
            raise ValueError(
                f"gate rule on {self.metric} compares with the {self.baseline} but does not say which way is better; "
                "write direction: higher or direction: lower"
            )
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"gate rule on {self.metric}: min {self.min:g} is above max {self.max:g}: nothing passes")
        if self.baseline == "reference" and not compares:
            raise ValueError(
                f"gate rule on {self.metric}: baseline: reference has no effect without max_regression or "
                "min_improvement; add one of them or drop it"
            )
        return self

    @model_validator(mode="after")
    def _slices_make_sense(self) -> GateRule:
        if len(set(self.slices)) < len(self.slices):
            raise ValueError(f"gate rule on {self.metric}: a slice is named twice; name each once")
        return self

    @property
    def compares(self) -> bool:
        """Whether it has a limit on the change against its baseline."""
        return self.max_regression is not None or self.min_improvement is not None

    @property
    def holds_without_champion(self) -> bool:
        """Whether anything of it is judged on the first version ever; otherwise it is skipped there."""
        has_band = self.min is not None or self.max is not None
        return not self.needs_champion and (has_band or self.baseline == "reference")

    @property
    def label(self) -> str:
        """The rule's name in decisions, tags and reports."""
        return self.name or (f"{self.metric}_vs_{self.baseline}" if self.compares else self.metric)


class GatesConfig(Section):
    """Rules of promotion. Promoted is what meets every blocking rule; whatever cannot be judged is not promoted."""

    rules: tuple[GateRule, ...] = ()
    """The rules, in the order in which they are told; at least one must block."""
    epsilon: Positive = 1e-6
    """A baseline whose absolute value is not above this counts as 0, which has no relative change (metric's unit)."""

    @model_validator(mode="after")
    def _rules_can_judge(self) -> GatesConfig:
        if not self.rules:
            raise ValueError(
                "no gate rules are configured, so nothing could ever be refused; write at least one, e.g. "
                "rules: [{metric: reward, direction: higher, baseline: reference, min_improvement: 0}]"
            )
        if all(rule.severity != "block" for rule in self.rules):
            raise ValueError("no gate rule blocks, so every challenger would be promoted; give one severity: block")
        seen: set[str] = set()
        for label in (rule.label for rule in self.rules):
            if label in seen:
                raise ValueError(f"two gate rules are called {label!r}; give each its own name")
            if label == REPORT_LABEL:
                raise ValueError(f"the name {label!r} is taken by the gate's own check of the report; choose another")
            seen.add(label)
        return self

    @property
    def hold_without_champion(self) -> bool:
        """Whether a first version could pass: some blocking rule is judged without a champion."""
        return any(rule.severity == "block" and rule.holds_without_champion for rule in self.rules)

    @property
    def confidence_levels(self) -> tuple[float, ...]:
        """Levels at which the evaluation must give intervals, ascending."""
        return tuple(sorted({rule.confidence for rule in self.rules if rule.confidence is not None}))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that the rules read, each once, in the rules' order."""
        return tuple(dict.fromkeys(rule.metric for rule in self.rules))

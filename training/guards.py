"""Guards: rules, as data, that look at every step's metrics. What follows is the loop's business. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from configs.schema.guards import GuardRule
from training.errors import ConfigError

HISTORY = 512
SAMPLING_ERRORS = 3.0
_NONE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Firing:
    """One rule that fired: its place in the list, what was seen, and a sentence for a person."""

    index: int
    rule: GuardRule
    step: int
    value: float
    limit: float | None
    sentence: str


class GuardMonitor:
    """Evaluates rules on the metrics of each step. Its state is part of every checkpoint."""

    def __init__(
        self, rules: Sequence[GuardRule], known_metrics: Sequence[str], baseline_metrics: Sequence[str]
    ) -> None:
        """`known_metrics` are measured at some step, `baseline_metrics` before the first one too: a rule on anything
        else could never fire, and raises ConfigError."""
        for rule in rules:
            if rule.metric not in known_metrics:
                raise ConfigError(
                    f"guards.rules: {rule.label!r} watches {rule.metric!r}, which this stage does not measure",
                    f"write one of {', '.join(sorted(known_metrics))}",
                )
            if rule.needs_baseline and rule.metric not in baseline_metrics:
                raise ConfigError(
                    f"guards.rules: {rule.label!r} is relative to the baseline, but {rule.metric!r} has no baseline",
                    f"use relative_to: running_median, or watch one of {', '.join(sorted(baseline_metrics))}",
                )
        self.rules = list(rules)
        self.baseline: dict[str, float] = {}
        self.baseline_within: dict[str, float] = {}
        self.baseline_samples: dict[str, int] = {}
        self._values: list[deque[float]] = [deque(maxlen=max(rule.window, 1)) for rule in rules]
        self._breaches = [0] * len(rules)
        self.rollbacks = [0] * len(rules)
        self.fired: list[dict[str, Any]] = []

    def set_baseline(
        self, metrics: Mapping[str, float], samples: Mapping[str, int] = _NONE, within: Mapping[str, float] = _NONE
    ) -> None:
        """Metrics before the first step, for rules relative to the baseline; `samples`: what a share was counted on;
        `within`: those of the fewer prompts that a look within a round asks, and is held against.

        Raises ConfigError where no limit can be made of one: its rule would never fire, and nobody would know.
        """
        for rule in self.rules:
            if rule.needs_baseline and rule.op != "nonfinite":
                for known in (metrics, {**metrics, **within}):
                    _demand_baseline(rule, float(known.get(rule.metric, math.nan)))
        self.baseline_samples = dict(samples)
        self.baseline = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        self.baseline_within = {key: float(value) for key, value in within.items() if math.isfinite(value)}

    def observe(
        self, step: int, metrics: Mapping[str, float], samples: Mapping[str, int] = _NONE, within_round: bool = False
    ) -> list[Firing]:
        """Rules that fire on these metrics. A metric that was not measured at this step leaves its rule as it was.
        `samples`: on how many samples a metric that is a share was counted. `within_round`: on which prompts."""
        firings = []
        baseline = self.baseline | (self.baseline_within if within_round else {})
        for index, rule in enumerate(self.rules):
            if rule.metric not in metrics:
                continue
            first = baseline.get(rule.metric, math.nan)
            firing = self._evaluate(index, rule, step, float(metrics[rule.metric]), first, samples.get(rule.metric))
            if firing is not None:
                firings.append(firing)
                self.fired.append(
                    {"step": step, "rule": rule.label, "action": rule.action, "sentence": firing.sentence}
                )
                del self.fired[:-HISTORY]
        return firings

    def _evaluate(
        self, index: int, rule: GuardRule, step: int, value: float, baseline: float, samples: int | None
    ) -> Firing | None:
        limit, seen = self._limit_and_seen(index, rule, value, baseline, samples)
        breach = _breaches(rule, seen, limit)
        if math.isfinite(value):
            self._values[index].append(value)
        self._breaches[index] = self._breaches[index] + 1 if breach else 0
        if self._breaches[index] < rule.patience:
            return None
        self._breaches[index] = 0
        shown = "not finite" if limit is None else f"{rule.op} {limit:.4g}"
        return Firing(
            index,
            rule,
            step,
            seen,
            limit,
            f"{rule.metric} = {seen:.4g} is {shown} (rule {rule.label!r}): {rule.action}",
        )

    def _limit_and_seen(
        self, index: int, rule: GuardRule, value: float, baseline: float, samples: int | None
    ) -> tuple[float | None, float]:
        history = self._values[index]
        if rule.op == "nonfinite" or rule.threshold is None:
            return None, value
        if rule.relative_to == "running_median":
            # Too short a history has no median worth the name: nothing to compare with yet.
            known = len(history) >= max(2, rule.window // 2)
            return (rule.threshold * statistics.median(history) if known else math.nan), value
        seen = statistics.fmean([*list(history)[-(rule.window - 1) :], value]) if rule.window > 1 else value
        if rule.relative_to == "above_baseline":
            first = self.baseline_samples.get(rule.metric)
            error = sampling_error(baseline, first, seen, samples) if first and samples else 0.0
            return baseline + max(rule.threshold, SAMPLING_ERRORS * error), seen
        if rule.relative_to == "baseline":
            return (rule.threshold * baseline if baseline > 0 else math.nan), seen
        return rule.threshold, seen

    def forget_recent(self) -> None:
        """After a rollback the breaches that led to it are over; the values seen on the way are dropped."""
        self._breaches = [0] * len(self.rules)
        for values in self._values:
            values.clear()

    def state_dict(self) -> dict[str, Any]:
        """JSON state."""
        return {
            "baseline": self.baseline,
            "baseline_within": self.baseline_within,
            "baseline_samples": self.baseline_samples,
            "values": [list(values) for values in self._values],
            "breaches": list(self._breaches),
            "rollbacks": list(self.rollbacks),
            "fired": list(self.fired),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, for the same rules."""
        self.baseline = dict(state["baseline"])
        # Absent in a checkpoint of an older version:
        self.baseline_samples = dict(state.get("baseline_samples", {}))
        self.baseline_within = dict(state.get("baseline_within", {}))
        self._values = [
            deque(values, maxlen=max(rule.window, 1)) for rule, values in zip(self.rules, state["values"], strict=True)
        ]
        self._breaches, self.rollbacks = list(state["breaches"]), list(state["rollbacks"])
        self.fired = list(state["fired"])


def _demand_baseline(rule: GuardRule, baseline: float) -> None:
    """A multiple of nothing, or of a negative number, is no limit; nothing is added to what is no number."""
    told = f"guards.rules: {rule.label!r}: {rule.metric!r} is {baseline:.4g} before the first step, which is no number"
    if not math.isfinite(baseline):
        verb = "to add to" if rule.relative_to == "above_baseline" else "to multiply"
        raise ConfigError(f"{told} {verb}", "look at the model that comes in, or write a threshold without relative_to")
    if rule.relative_to == "baseline" and baseline <= 0:
        raise ConfigError(
            f"{told} to take a multiple of, so that the rule would never fire as it is meant",
            "write relative_to: above_baseline and what may be added, or a threshold without relative_to",
        )


def sampling_error(first: float, first_samples: int, second: float, second_samples: int) -> float:
    """Standard error of the difference of two shares that are counted on so many samples and are really the same.

    Binomial, with the share of both together: sqrt(p (1 - p) (1/n + 1/m)), as in the score test of two proportions
    (whose inversion for one share is Wilson's interval). Errors estimated from each share alone would be 0 where a
    small sample shows all or none. A limit of three of them is passed by chance in about one comparison of a thousand:
    half of 12 probe answers and 17 of a round's 24 (0.71) are no sign of anything, all 24 of them are. On hundreds of
    answers it is below 0.1, and the rule's own threshold holds. Answers to one prompt are alike, which widens the
    truth a little; counting prompts instead would let a small round pass in which every score is damaged.
    """
    samples = first_samples + second_samples
    both = (first * first_samples + second * second_samples) / samples
    return math.sqrt(max(both * (1.0 - both), 0.0) * (1.0 / first_samples + 1.0 / second_samples))


def _breaches(rule: GuardRule, seen: float, limit: float | None) -> bool:
    if rule.op == "nonfinite":
        return not math.isfinite(seen)
    if limit is None or math.isnan(limit):
        return False  # no reference yet
    if math.isnan(seen):
        return True  # NaN is never inside a limit
    return {">": seen > limit, ">=": seen >= limit, "<": seen < limit, "<=": seen <= limit}[rule.op]

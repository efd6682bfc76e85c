"""A limit of a rule as a number and a relation, and how an interval is held against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from configs.schema.gates import Amount, GateRule
from training.evaluation.decision import LimitKind, Relation, Verdict


@dataclass(frozen=True)
class Limit:
    """`relation threshold`, e.g. at most 0.1. `basis` says where a relative threshold comes from."""

    kind: LimitKind
    relation: Relation
    threshold: float
    basis: str = ""

    def judge(self, low: float, high: float) -> Verdict:
        """PASS when the worse bound clears the limit, FAIL when not even the better one does, else INCONCLUSIVE."""
        worse, better = (low, high) if self.relation in ("above", "at least") else (high, low)
        if self._clears(worse):
            return "PASS"
        return "INCONCLUSIVE" if self._clears(better) else "FAIL"

    def _clears(self, bound: float) -> bool:
        # written so that a NaN bound clears nothing
        if self.relation == "above":
            return bound > self.threshold
        if self.relation == "at least":
            return bound >= self.threshold
        return bound < self.threshold if self.relation == "below" else bound <= self.threshold


def band_limits(rule: GateRule) -> list[Limit]:
    """Limits on the metric itself."""
    limits = [
        None if rule.min is None else Limit("min", "at least", rule.min),
        None if rule.max is None else Limit("max", "at most", rule.max),
    ]
    return [limit for limit in limits if limit is not None]


def change_limits(rule: GateRule, baseline: float, epsilon: float) -> list[Limit]:
    """Limits on challenger minus baseline, given the baseline's value (finite)."""
    higher = rule.direction == "higher"
    limits: list[Limit] = []
    if rule.min_improvement is not None:
        least, basis = _amount(rule.min_improvement, baseline, epsilon, rule.baseline, max)
        limits.append(Limit("min_improvement", "above" if higher else "below", _towards(higher, least), basis))
    if rule.max_regression is not None:
        most, basis = _amount(rule.max_regression, baseline, epsilon, rule.baseline, min)
        limits.append(Limit("max_regression", "at least" if higher else "at most", _towards(not higher, most), basis))
    return limits


def _towards(up: bool, amount: float) -> float:
    # 0 - 0 and not -0: a limit of none is written 0
    return amount if up else 0.0 - amount


def _amount(
    amount: Amount, baseline: float, epsilon: float, whose: str, stricter: Callable[[float, float], float]
) -> tuple[float, str]:
    """The amount in the metric's unit. Relative is to |baseline|: rewards are often negative."""
    absolute, relative = amount.absolute, amount.relative
    if relative is None:
        assert absolute is not None  # Amount refuses to have neither
        return absolute, ""
    if abs(baseline) <= epsilon:
        fallback = relative if absolute is None else absolute
        return fallback, f"absolute, because the {whose}'s {baseline:.4g} counts as 0"
    share = relative * abs(baseline)
    if absolute is not None and stricter(share, absolute) == absolute:
        return absolute, ""
    return share, f"{100 * relative:g} % of the {whose}'s {abs(baseline):.4g}"

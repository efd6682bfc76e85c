"""One gate rule held against the report: every limit, over all samples and in every slice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from configs.schema.gates import GateRule
from training.evaluation import gate_sentences as say
from training.evaluation.decision import CheckOutcome, LimitKind, RuleOutcome, RuleVerdict, worst_verdict
from training.evaluation.gate_limits import Limit, band_limits, change_limits
from training.evaluation.report_records import Estimate, EvaluationReport, Measurement, MetricReport


@dataclass(frozen=True)
class _Scope:
    """Where a rule is being held: which samples, and how many are needed."""

    rule: GateRule
    slice: str | None
    min_n: int
    epsilon: float

    @property
    def subject(self) -> str:
        return say.subject(self.rule.metric, self.slice)

    def outcome(self, kind: LimitKind, verdict: RuleVerdict, sentence: str) -> CheckOutcome:
        return CheckOutcome(kind=kind, scope=self.slice, verdict=verdict, sentence=sentence)


def judge_rule(rule: GateRule, report: EvaluationReport, has_champion: bool, epsilon: float) -> RuleOutcome:
    """Every check of one rule. What cannot be judged fails; without a champion, comparisons with it are skipped."""
    if rule.needs_champion and not has_champion:
        checks = [_skipped(rule, kind) for kind in _kinds(rule)]
    else:
        checks = list(_checks(rule, report, has_champion, epsilon))
    verdict = worst_verdict(check.verdict for check in checks)
    decisive = next(check for check in checks if check.verdict == verdict)
    return RuleOutcome(
        label=rule.label,
        metric=rule.metric,
        severity=rule.severity,
        verdict=verdict,
        sentence=say.rule_sentence(rule, decisive, checks),
        checks=tuple(checks),
    )


def _checks(rule: GateRule, report: EvaluationReport, has_champion: bool, epsilon: float) -> Iterator[CheckOutcome]:
    metric = report.metric(rule.metric)
    compare = rule.compares and (has_champion or rule.baseline == "reference")
    if rule.compares and not compare:
        yield from (_skipped(rule, kind) for kind in _kinds(rule) if kind in ("min_improvement", "max_regression"))
        if rule.min is None and rule.max is None:
            return
    if metric is None:
        known = [found.name for found in report.metrics]
        yield _Scope(rule, None, rule.min_n, epsilon).outcome(
            _kinds(rule)[0], "FAIL", say.metric_missing(rule.metric, known)
        )
        return
    for scope, measurement in _scopes(rule, metric, epsilon):
        if measurement is None:
            present = [part.name for part in metric.slices]
            yield scope.outcome(_kinds(rule)[0], "FAIL", say.slice_missing(scope.subject, present))
            continue
        if compare:
            yield from _change_checks(scope, measurement)
        yield from (_held(scope, limit, measurement.challenger, None) for limit in band_limits(rule))


def _scopes(rule: GateRule, metric: MetricReport, epsilon: float) -> Iterator[tuple[_Scope, Measurement | None]]:
    yield _Scope(rule, None, rule.min_n, epsilon), metric.overall
    for wanted in rule.slices:
        names = [wanted]
        if wanted.endswith("=*"):
            names = [part.name for part in metric.slices if part.name.startswith(wanted[:-1])] or [wanted]
        for name in names:
            yield _Scope(rule, name, rule.min_slice_n, epsilon), metric.slice(name)


def _change_checks(scope: _Scope, measurement: Measurement) -> Iterator[CheckOutcome]:
    rule, challenger = scope.rule, measurement.challenger
    champion = rule.baseline == "champion"
    baseline = measurement.champion if champion else measurement.reference
    change = measurement.versus_champion if champion else measurement.versus_reference
    kind: LimitKind = "max_regression" if rule.min_improvement is None else "min_improvement"
    if baseline is None or change is None:
        yield scope.outcome(kind, "FAIL", say.baseline_missing(scope.subject, rule.baseline))
        return
    for estimate, whose in ((challenger, "challenger"), (baseline, rule.baseline), (change, "change")):
        if reason := _defect(estimate, scope.min_n):
            yield scope.outcome(kind, "FAIL", say.defect(scope.subject, reason, whose))
            return
    if not _adds_up(challenger, baseline, change):
        yield scope.outcome(kind, "ERROR", say.contradiction(scope.subject, rule.baseline))
        return
    for limit in change_limits(rule, baseline.value, scope.epsilon):
        yield _held(scope, limit, change, baseline.value)


def _held(scope: _Scope, limit: Limit, estimate: Estimate, baseline: float | None) -> CheckOutcome:
    """Hold one estimate against one limit: finiteness first, then the count, then the interval."""
    rule = scope.rule
    if reason := _defect(estimate, scope.min_n):
        return scope.outcome(limit.kind, "FAIL", say.defect(scope.subject, reason))
    low, high, level = estimate.value, estimate.value, None
    if rule.confidence is not None:
        interval = estimate.interval(rule.confidence)
        if interval is None:
            return scope.outcome(limit.kind, "ERROR", say.interval_missing(scope.subject, rule.confidence))
        low, high, level = interval.low, interval.high, interval.confidence
        if not (math.isfinite(low) and math.isfinite(high)):
            return scope.outcome(limit.kind, "FAIL", say.defect(scope.subject, "has an interval that is not finite"))
    verdict = limit.judge(low, high)
    whose = None if baseline is None else rule.baseline
    return CheckOutcome(
        kind=limit.kind,
        scope=scope.slice,
        verdict=verdict,
        sentence=say.held(scope.subject, limit, (estimate.value, low, high), level, whose, verdict),
        value=estimate.value,
        low=low,
        high=high,
        relation=limit.relation,
        limit=limit.threshold,
        baseline=baseline,
        n=estimate.n,
    )


def _defect(estimate: Estimate, min_n: int) -> str | None:
    if not math.isfinite(estimate.value):
        return f"is {estimate.value}, not a finite number"
    if estimate.nonfinite:
        return f"has {estimate.nonfinite} NaN or infinite values among its {estimate.n}"
    if estimate.n < min_n:
        return f"rests on {estimate.n} samples, needs at least {min_n}"
    return None


def _adds_up(challenger: Estimate, baseline: Estimate, change: Estimate) -> bool:
    """Whether the change really is challenger minus baseline: a flipped sign must not decide a promotion."""
    size = max(abs(challenger.value), abs(baseline.value))
    return abs(change.value - (challenger.value - baseline.value)) <= 1e-9 + 1e-6 * size


def _kinds(rule: GateRule) -> list[LimitKind]:
    given: dict[LimitKind, object] = {
        "min_improvement": rule.min_improvement,
        "max_regression": rule.max_regression,
        "min": rule.min,
        "max": rule.max,
    }
    return [kind for kind, limit in given.items() if limit is not None]


def _skipped(rule: GateRule, kind: LimitKind) -> CheckOutcome:
    return CheckOutcome(kind=kind, scope=None, verdict="SKIPPED", sentence=say.no_champion(rule.metric))

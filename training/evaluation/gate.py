"""The gate: one pure decision from the evaluation report and the rules. It fails closed.

Example:
    decision = decide(read_report(path), night.gates, has_champion=champion is not None)
    if decision.promote: ...
    print(explain(decision))
"""

from __future__ import annotations

import hashlib
import json

from configs.schema.gates import REPORT_LABEL, GatesConfig
from training.errors import GateError
from training.evaluation.decision import (
    CheckOutcome,
    GateDecision,
    RuleOutcome,
    overall_verdict,
    read_decision,
    worst_verdict,
    write_decision,
)
from training.evaluation.gate_markdown import decision_markdown
from training.evaluation.gate_rules import judge_rule
from training.evaluation.gate_sentences import explain, overall_sentence
from training.evaluation.records import nonfinite_places
from training.evaluation.report_records import EvaluationReport

__all__ = [
    "CheckOutcome",
    "GateDecision",
    "RuleOutcome",
    "decide",
    "decision_markdown",
    "explain",
    "read_decision",
    "write_decision",
]


def decide(report: EvaluationReport, gates: GatesConfig, has_champion: bool) -> GateDecision:
    """Judge the challenger of `report`.

    `has_champion`: whether a version is in production; without one, rules that compare with it are skipped and the
    others hold. Raises GateError when no rule could ever block, since such a gate would promote anything.
    """
    if not any(rule.severity == "block" for rule in gates.rules):
        raise GateError(
            "the gate has no blocking rule, so it would promote anything", "write gates.rules in the config"
        )
    rules = (
        _judge_report(report, has_champion),
        *(judge_rule(rule, report, has_champion, gates.epsilon) for rule in gates.rules),
    )
    verdict = overall_verdict(rules)
    return GateDecision(
        verdict=verdict,
        sentence=overall_sentence(verdict, rules, has_champion),
        night=report.night,
        has_champion=has_champion,
        challenger=report.challenger.sha256,
        champion=report.champion.sha256 if report.champion else None,
        report_digest=report.digest(),
        gates_digest=_digest(gates),
        rules=rules,
    )


def _judge_report(report: EvaluationReport, has_champion: bool) -> RuleOutcome:
    """The gate's own check, before any rule: every number finite, and made with the champion it is judged against."""
    checks = (_finite(report), _models(report, has_champion))
    verdict = worst_verdict(check.verdict for check in checks)
    sentence = next(check.sentence for check in checks if check.verdict == verdict)
    if verdict == "PASS":
        sentence = f"{REPORT_LABEL}: every number is finite and the models are the expected ones: PASS"
    return RuleOutcome(
        label=REPORT_LABEL,
        metric=REPORT_LABEL,
        severity="block",
        verdict=verdict,
        sentence=sentence,
        checks=checks,
    )


def _finite(report: EvaluationReport) -> CheckOutcome:
    places = list(nonfinite_places(report))
    places += [f"metrics.{name} has {count} NaN or infinite values" for name, count in _nonfinite_counts(report)]
    if not places:
        return CheckOutcome(
            kind="finite", scope=None, verdict="PASS", sentence=f"{REPORT_LABEL}: every number is finite: PASS"
        )
    shown = "; ".join(places[:3]) + (f"; and {len(places) - 3} more" if len(places) > 3 else "")
    sentence = (
        f"{REPORT_LABEL}: not every number is finite ({shown}): FAIL; look at those models and the evaluation's log"
    )
    return CheckOutcome(kind="finite", scope=None, verdict="FAIL", sentence=sentence)


def _nonfinite_counts(report: EvaluationReport) -> list[tuple[str, int]]:
    """Metrics whose per-sample values were not all finite, with the highest count: a finite value may hide them."""
    counts = []
    for metric in report.metrics:
        measured = [metric.overall, *(part.measurement for part in metric.slices)]
        estimates = [getattr(one, key) for one in measured for key in type(one).model_fields]
        worst = max(estimate.nonfinite for estimate in estimates if estimate is not None)
        if worst:
            counts.append((metric.name, worst))
    return counts


def _models(report: EvaluationReport, has_champion: bool) -> CheckOutcome:
    made_with = report.champion is not None
    if report.champion is not None and report.champion.sha256 == report.challenger.sha256:
        return CheckOutcome(
            kind="models",
            scope=None,
            verdict="FAIL",
            sentence=f"{REPORT_LABEL}: the challenger is the champion itself, nothing better was found: FAIL; it stays",
        )
    if made_with == has_champion:
        return CheckOutcome(
            kind="models",
            scope=None,
            verdict="PASS",
            sentence=f"{REPORT_LABEL}: the models are the expected ones: PASS",
        )
    sentence = (
        f"{REPORT_LABEL}: it was made {'with' if made_with else 'without'} a champion, but there is "
        f"{'one' if has_champion else 'none'} now: ERROR; evaluate again"
    )
    return CheckOutcome(kind="models", scope=None, verdict="ERROR", sentence=sentence)


def _digest(gates: GatesConfig) -> str:
    return hashlib.sha256(json.dumps(gates.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

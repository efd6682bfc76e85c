"""What the gate decided, as a record that says why and cannot contradict itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.gates import REPORT_LABEL, Severity
from training.evaluation.records import Number, Record, read_record, write_record

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "ERROR"]
RuleVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "ERROR", "SKIPPED"]
LimitKind = Literal["min_improvement", "max_regression", "min", "max"]
Relation = Literal["above", "at least", "at most", "below"]

_WORST_FIRST: tuple[Verdict, ...] = ("ERROR", "FAIL", "INCONCLUSIVE", "PASS")


class CheckOutcome(Record):
    """One limit on one set of samples. Numbers are null where the check ended before it had them."""

    kind: LimitKind | Literal["finite", "models"]
    """The limit; finite and models belong to the gate's own check of the report."""
    scope: str | None
    """The slice, or null for all samples."""
    verdict: RuleVerdict
    sentence: str
    value: Number | None = None
    """The metric, or its change against the baseline for min_improvement and max_regression."""
    low: Number | None = None
    high: Number | None = None
    """Interval at the rule's level; both equal the value where the rule judges the bare value."""
    relation: Relation | None = None
    limit: Number | None = None
    """`relation limit` is what low and high were held against, e.g. above 0."""
    baseline: Number | None = None
    """Value of the model compared with."""
    n: int | None = None
    """Samples."""


class RuleOutcome(Record):
    """One rule: the worst of its checks, and one sentence on it."""

    label: str
    metric: str
    severity: Severity
    verdict: RuleVerdict
    sentence: str
    checks: Annotated[tuple[CheckOutcome, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _worst_check_counts(self) -> RuleOutcome:
        worst = worst_verdict(check.verdict for check in self.checks)
        if self.verdict != worst:
            raise ValueError(f"rule {self.label}: verdict {self.verdict} contradicts its checks ({worst})")
        return self

    @property
    def blocks(self) -> bool:
        """Whether it stands in the way of promotion."""
        return self.severity == "block" and self.verdict not in ("PASS", "SKIPPED")


class GateDecision(Record):
    """The verdict on one challenger. Only PASS promotes."""

    schema_version: Literal[1] = 1
    verdict: Verdict
    sentence: str
    """The whole decision in one sentence."""
    night: str
    has_champion: bool
    challenger: str
    """sha256 of the model that was judged."""
    champion: str | None
    """sha256 of the model it was judged against; null on the first version ever."""
    report_digest: str
    """EvaluationReport.digest() of the report that was judged."""
    gates_digest: str
    """sha256 of the rules."""
    rules: tuple[RuleOutcome, ...]
    """The gate's own check of the report first, then the rules in the config's order."""

    @model_validator(mode="after")
    def _rules_decide(self) -> GateDecision:
        decided = overall_verdict(self.rules)
        if self.verdict != decided:
            raise ValueError(f"verdict {self.verdict} contradicts the rules ({decided})")
        return self

    @property
    def promote(self) -> bool:
        """Whether the challenger may become champion."""
        return self.verdict == "PASS"

    @property
    def blocking(self) -> tuple[RuleOutcome, ...]:
        """Rules that stand in the way."""
        return tuple(rule for rule in self.rules if rule.blocks)

    @property
    def told(self) -> tuple[RuleOutcome, ...]:
        """Rules that are not met and do not block: warnings and dry runs."""
        return tuple(r for r in self.rules if r.severity != "block" and r.verdict not in ("PASS", "SKIPPED"))


def worst_verdict(verdicts: Iterable[RuleVerdict]) -> RuleVerdict:
    """ERROR before FAIL before INCONCLUSIVE before PASS; SKIPPED only where nothing was judged."""
    seen = set(verdicts)
    return next((verdict for verdict in _WORST_FIRST if verdict in seen), "SKIPPED")


def overall_verdict(rules: Iterable[RuleOutcome]) -> Verdict:
    """The worst of the blocking rules; FAIL where none of them, beyond the check of the report, was judged."""
    blocking = [rule for rule in rules if rule.severity == "block"]
    worst = worst_verdict(rule.verdict for rule in blocking)
    judged = any(rule.verdict != "SKIPPED" for rule in blocking if rule.label != REPORT_LABEL)
    if worst == "SKIPPED" or (worst == "PASS" and not judged):
        return "FAIL"
    return worst


def write_decision(path: Path, decision: GateDecision) -> None:
    """Write decision.json atomically. Raises GateError where the disk refuses."""
    write_record(path, decision)


def read_decision(path: Path) -> GateDecision:
    """Read decision.json. Raises GateError when it is missing, damaged, or its verdict contradicts its rules."""
    return read_record(path, GateDecision)

"""The gate's words: one sentence a check and a rule, each ending in what a person can do."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from configs.schema.gates import REPORT_LABEL, GateRule
from training.evaluation.decision import CheckOutcome, GateDecision, RuleOutcome, RuleVerdict, Verdict
from training.evaluation.gate_limits import Limit

MAY_BECOME_CHAMPION = "the challenger may become champion"
"""What the gate allows, said before anything has happened. A page that is read later says what did."""

_ADVICE: dict[RuleVerdict, str] = {
    "FAIL": "even the better end of the interval misses it, so more prompts will not help",
    "INCONCLUSIVE": "the limit lies inside the interval, more prompts (evaluation.prompts) would narrow it",
}
_NO_INTERVAL_ADVICE = "the value misses it"
_PROBLEMS: dict[RuleVerdict, str] = {"ERROR": "could not judge", "FAIL": "not met", "INCONCLUSIVE": "undecided"}
_SEVERITY = {"block": "blocks", "warn": "warning", "dry_run": "dry run"}
_SOFT = {"warn": "warning only, does not block", "dry_run": "dry run, does not block"}


def subject(metric: str, scope: str | None) -> str:
    """What a sentence is about."""
    return metric if scope is None else f"{metric} in {scope}"


def number(value: float) -> str:
    """Four significant digits, without exponents for everyday sizes."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def held(
    about: str,
    limit: Limit,
    measured: tuple[float, float, float],
    level: float | None,
    baseline: str | None,
    verdict: Verdict,
) -> str:
    """`reward: +0.31 over the reference, 95 % interval [0.22, 0.4], needs above 0: PASS`."""
    value, low, high = measured
    shown = number(value)
    if baseline is not None:
        shown = f"{'+' if value >= 0 else ''}{shown} {'over' if value >= 0 else 'against'} the {baseline}"
    interval = "" if level is None else f", {100 * level:g} % interval [{number(low)}, {number(high)}]"
    basis = f" ({limit.basis})" if limit.basis else ""
    advice = _NO_INTERVAL_ADVICE if level is None else _ADVICE.get(verdict, "")
    end = "" if verdict == "PASS" else f"; {advice}"
    return f"{about}: {shown}{interval}, needs {limit.relation} {number(limit.threshold)}{basis}: {verdict}{end}"


def defect(about: str, reason: str, whose: str | None = None) -> str:
    """A number that cannot be judged."""
    model = "" if whose is None else f" of the {whose}"
    way_out = (
        "raise evaluation.prompts, hold out more (data.evaluation_fraction), or lower the rule's minimum"
        if "needs at least" in reason
        else "look at that model and at the evaluation's log"
    )
    return f"{about}{model} {reason}: FAIL; {way_out}"


def metric_missing(metric: str, known: Sequence[str]) -> str:
    """A metric that the report does not have."""
    close = difflib.get_close_matches(metric, known, n=1)
    guess = f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'none'}"
    return f"{metric}: not in the report: FAIL; measure it or correct the rule ({guess})"


def slice_missing(about: str, present: Sequence[str]) -> str:
    """A configured slice without a single sample."""
    there = ", ".join(present) or "none"
    return (
        f"{about}: this slice never appeared: FAIL; evaluate prompts of it or drop it from the rule (present: {there})"
    )


def baseline_missing(about: str, baseline: str) -> str:
    """A comparison whose other side was not measured."""
    return f"{about}: the report has no value of the {baseline} to compare with: FAIL; evaluate the {baseline} too"


def contradiction(about: str, baseline: str) -> str:
    """A difference that is not the difference of its sides."""
    return (
        f"{about}: the reported change is not challenger minus {baseline}: ERROR; the report is wrong, evaluate again"
    )


def interval_missing(about: str, confidence: float) -> str:
    """No interval of at least the level the rule asks for."""
    return (
        f"{about}: the report has no interval at {100 * confidence:g} % or more: ERROR; evaluate again with that "
        "level, or judge the bare value of an exact metric with confidence: null"
    )


def no_champion(metric: str) -> str:
    """A comparison on the first version ever."""
    return f"{metric}: compares with the champion, and there is none yet: SKIPPED"


def rule_sentence(rule: GateRule, decisive: CheckOutcome, checks: Sequence[CheckOutcome]) -> str:
    """The decisive check's sentence, how the rule's other checks ended, and whether it blocks."""
    others = Counter(check.verdict for check in checks)
    others[decisive.verdict] -= 1
    counts = ", ".join(f"{count} {verdict}" for verdict, count in others.items() if count > 0)
    soft = "" if decisive.verdict in ("PASS", "SKIPPED") else _SOFT.get(rule.severity, "")
    notes = "; ".join(note for note in (f"other checks of this rule: {counts}" if counts else "", soft) if note)
    return f"{decisive.sentence} ({notes})" if notes else decisive.sentence


def overall_sentence(verdict: Verdict, rules: Sequence[RuleOutcome], has_champion: bool) -> str:
    """The decision in one sentence."""
    problems = "; ".join(
        f"{words}: {', '.join(labels)}"
        for kind, words in _PROBLEMS.items()
        if (labels := [rule.label for rule in rules if rule.blocks and rule.verdict == kind])
    )
    kept = "the champion stays" if has_champion else "nothing is promoted"
    if verdict == "PASS":
        said = f"PASS: {_count(rules)} blocking rules hold; {MAY_BECOME_CHAMPION}"
    elif verdict == "INCONCLUSIVE":
        said = f"INCONCLUSIVE: {problems}; a person decides where approval is configured, otherwise {kept}"
    elif problems:
        said = f"{verdict}: {problems}; {kept}"
    else:
        said = (
            "FAIL: every blocking rule compares with a champion and there is none, so nothing was judged; add a rule "
            "with min, max or baseline: reference"
        )
    return said + _aside(rules)


def _count(rules: Sequence[RuleOutcome]) -> str:
    blocking = [rule for rule in rules if rule.severity == "block" and rule.label != REPORT_LABEL]
    judged = sum(rule.verdict != "SKIPPED" for rule in blocking)
    return f"{judged} of {len(blocking)}"


def _aside(rules: Sequence[RuleOutcome]) -> str:
    told = [
        f"{rule.label} {rule.verdict} ({_SEVERITY[rule.severity]})"
        for rule in rules
        if rule.severity != "block" and rule.verdict not in ("PASS", "SKIPPED")
    ]
    skipped = [rule.label for rule in rules if rule.verdict == "SKIPPED"]
    aside = f". Told without blocking: {', '.join(told)}" if told else ""
    return aside + (f". Skipped, because there is no champion yet: {', '.join(skipped)}" if skipped else "")


def explain(decision: GateDecision, outcome: str | None = None) -> str:
    """The decision as plain text: the whole in one sentence, then one line a rule, what stands in the way first.

    `outcome`: what became of it, in place of what the gate allowed.
    """
    width = max((len(_tag(rule)) for rule in decision.rules), default=0)
    lines = [f"  {_tag(rule):<{width}}  {_named(rule)}" for rule in most_urgent_first(decision.rules)]
    return "\n".join([outcome or decision.sentence, "", *lines])


def most_urgent_first(rules: Sequence[RuleOutcome]) -> list[RuleOutcome]:
    """What blocks, then by verdict; the gate's own check comes last where it found nothing."""
    order = ["ERROR", "FAIL", "INCONCLUSIVE", "PASS", "SKIPPED"]
    return sorted(rules, key=lambda r: (not r.blocks, order.index(r.verdict), not r.blocks and r.label == REPORT_LABEL))


def _tag(rule: RuleOutcome) -> str:
    return rule.verdict if rule.severity == "block" else f"{rule.verdict} ({_SEVERITY[rule.severity]})"


def _named(rule: RuleOutcome) -> str:
    return rule.sentence if rule.sentence.startswith(rule.label) else f"{rule.label}: {rule.sentence}"

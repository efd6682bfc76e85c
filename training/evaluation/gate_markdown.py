"""The decision as a note for the MLflow run page: sentences on top, numbers below."""

from __future__ import annotations

import re
from collections.abc import Sequence

from training.evaluation.decision import CheckOutcome, GateDecision, RuleOutcome
from training.evaluation.gate_sentences import MAY_BECOME_CHAMPION, most_urgent_first, number

_HEADLINES = {"PASS": "passed", "FAIL": "not passed", "INCONCLUSIVE": "undecided", "ERROR": "could not judge"}
_NEXT = "next its version is registered, proved and made champion"


def decision_markdown(decision: GateDecision, outcome: str | None = None) -> str:
    """Verdict, what became of it, one bullet a rule (what stands in the way first), then a table of all numbers.

    `outcome`: null while nothing has happened yet; the page then says what will.
    """
    champion = decision.champion[:12] if decision.champion else "none"
    ordered = most_urgent_first(decision.rules)
    parts = [
        f"## Gate: {_HEADLINES[decision.verdict]}",
        f"**{plain(outcome or _outlook(decision))}**",
        *_bullets("Stands in the way", [rule for rule in ordered if rule.blocks]),
        *_bullets("Told, does not block", decision.told),
        *_bullets("Holds", [rule for rule in ordered if rule.verdict == "PASS"]),
        *_bullets("Skipped", [rule for rule in decision.rules if rule.verdict == "SKIPPED"]),
        "### Numbers",
        _table(decision),
        f"Night `{plain(decision.night)}`, challenger `{decision.challenger[:12]}`, champion `{champion}`, "
        f"report `{decision.report_digest[:12]}`, rules `{decision.gates_digest[:12]}`.",
    ]
    return "\n\n".join(parts) + "\n"


def _outlook(decision: GateDecision) -> str:
    return decision.sentence.replace(MAY_BECOME_CHAMPION, _NEXT)


def _bullets(title: str, rules: Sequence[RuleOutcome]) -> list[str]:
    if not rules:
        return []
    return [f"### {title}", "\n".join(bullet(rule.label, rule.sentence) for rule in rules)]


def bullet(label: str, sentence: str) -> str:
    """A rule in one line that begins with its label, which is said once where the sentence begins with it as well."""
    name, told = plain(label), plain(sentence)
    return f"- **{name}**{told.removeprefix(name)}" if told.startswith(name) else f"- **{name}**: {told}"


def _table(decision: GateDecision) -> str:
    names = ("rule", "slice", "limit", "value", "interval", "needs", "n", "verdict")
    head = f"| {' | '.join(names)} |\n|{' --- |' * len(names)}"
    rows = [_row(rule, check) for rule in decision.rules for check in rule.checks if check.value is not None]
    return "\n".join([head, *rows])


def _row(rule: RuleOutcome, check: CheckOutcome) -> str:
    exact = check.low == check.high == check.value
    cells = [
        plain(rule.label),
        plain(check.scope or "all"),
        check.kind,
        _shown(check.value),
        "exact" if exact else f"{_shown(check.low)} to {_shown(check.high)}",
        f"{check.relation} {_shown(check.limit)}",
        "" if check.n is None else str(check.n),
        check.verdict if rule.severity == "block" else f"{check.verdict} ({rule.severity})",
    ]
    return f"| {' | '.join(cells)} |"


def _shown(value: float | None) -> str:
    return "" if value is None else number(value)


def plain(text: str) -> str:
    """Text from data or config as text: no line breaks, and nothing that markdown or HTML would act on."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    escaped = "".join(f"\\{sign}" if sign in "\\`*|" else sign for sign in flat)
    # brackets and underscores act only as links and at the edges of words; elsewhere they are left readable
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", escaped).replace("](", "]\\(").replace("][", "]\\[")

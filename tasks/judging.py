"""The gate as an act: report in, decision.json and decision.md out; and the same decision again from stored files."""

from __future__ import annotations

from pathlib import Path

from configs.schema import NightConfig
from tasks.night_state import NightBook, NightState
from training.errors import GateError
from training.evaluation.gate import GateDecision, decide, decision_markdown, explain, read_decision, write_decision
from training.evaluation.report import EvaluationReport, read_report

__all__ = [
    "FOLDER",
    "MARKDOWN",
    "EvaluationReport",
    "GateDecision",
    "explain_night",
    "judge",
    "read_report",
    "stored_decision",
]

FOLDER = "gate"
DECISION = "decision.json"
MARKDOWN = "decision.md"


def judge(report: EvaluationReport, config: NightConfig, has_champion: bool, folder: Path) -> GateDecision:
    """Decide and write the decision below `folder`. Raises GateError when there is nothing to judge by."""
    decision = decide(report, config.gates, has_champion)
    folder.mkdir(parents=True, exist_ok=True)
    write_decision(folder / DECISION, decision)
    (folder / MARKDOWN).write_text(decision_markdown(decision), encoding="utf-8")
    return decision


def stored_decision(book: NightBook, night: str) -> GateDecision:
    """The decision of a night. Raises GateError when it did not come to one."""
    return read_decision(book.folder(night) / FOLDER / DECISION)


def explain_night(book: NightBook, state: NightState) -> str:
    """The stored decision in words, made once more from the stored report and rules: both must agree."""
    stored = stored_decision(book, state.night)
    evaluated = state.stages.get("evaluate")
    if evaluated is None:
        raise GateError(f"night {state.night} has a decision, but no evaluation is noted", "run the night again")
    report = read_report(Path(evaluated.directory) / "report.json")
    anew = decide(report, book.config(state.night).gates, stored.has_champion)
    if anew != stored:
        raise GateError(
            f"night {state.night}: the stored report judged again is {anew.verdict}, the night said {stored.verdict}",
            "the report, the rules or the gate's code has changed since; do not trust either before you know which",
        )
    return explain(stored)

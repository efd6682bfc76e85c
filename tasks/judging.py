"""The gate as an act: report in, decision.json and decision.md out; and the same decision again from stored files."""

from __future__ import annotations

from pathlib import Path

from configs.errors import NightjarError
from configs.schema import NightConfig
from tasks.headline import headline
from tasks.night_state import NightBook, NightState
from training.errors import ContractError, GateError
from training.evaluation.gate import GateDecision, decide, decision_markdown, explain, read_decision, write_decision
from training.evaluation.report import EvaluationReport, read_report

__all__ = [
    "FOLDER",
    "MARKDOWN",
    "EvaluationReport",
    "GateDecision",
    "explain_damaged_night",
    "explain_night",
    "judge",
    "read_report",
    "stored_decision",
    "tell_outcome",
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


def tell_outcome(book: NightBook, state: NightState) -> None:
    """Write decision.md anew, now that it is known what became of the night. Raises GateError without a decision."""
    decision = stored_decision(book, state.night)
    page = decision_markdown(decision, _outcome(state, decision))
    (book.folder(state.night) / FOLDER / MARKDOWN).write_text(page, encoding="utf-8")


def explain_night(book: NightBook, state: NightState) -> str:
    """The stored decision in words, made once more from the stored report and rules: both must agree."""
    if not (book.folder(state.night) / FOLDER / DECISION).exists():
        ended = "is not done" if state.status == "running" else state.sentence.partition(": ")[2]
        raise GateError(f"night {state.night} has come to no decision: it {ended}", "see `nightjar status`")
    stored = stored_decision(book, state.night)
    evaluated = state.stages.get("evaluate")
    if evaluated is None:
        raise GateError(f"night {state.night} has a decision, but no evaluation is noted", "run the night again")
    report = read_report(Path(evaluated.directory) / "report.json")
    _require_same(book, state.night, report, stored)
    return explain(stored, _outcome(state, stored) if state.status != "running" else None)


def _outcome(state: NightState, decision: GateDecision) -> str:
    told = headline(state, decision)
    return f"{decision.verdict}, but the night {told}" if state.status == "failed" else told


def explain_damaged_night(book: NightBook, night: str, damage: ContractError) -> str:
    """As much as decision, report and config still tell of a night whose record cannot be read.

    Raises GateError when the decision cannot be read either, or the report says otherwise.
    """
    told = f"the record of night {night} is damaged: {damage}"
    try:
        stored = stored_decision(book, night)
    except GateError as error:
        raise GateError(f"{told}\nand its decision cannot be told: {error.message}") from None
    try:
        report = read_report(book.folder(night) / "evaluate" / "report.json")
        book.config(night)
    except NightjarError as error:
        again = f"not judged again: {error.message}"
    else:
        _require_same(book, night, report, stored)
        again = "judged again from the stored report and rules: the same"
    place = book.folder(night) / FOLDER / DECISION
    return f"{told}\n\nfrom {place} ({again}):\n\n{explain(stored)}"


def _require_same(book: NightBook, night: str, report: EvaluationReport, stored: GateDecision) -> None:
    anew = decide(report, book.config(night).gates, stored.has_champion)
    if anew != stored:
        raise GateError(
            f"night {night}: the stored report judged again is {anew.verdict}, the night said {stored.verdict}",
            "the report, the rules or the gate's code has changed since; do not trust either before you know which",
        )

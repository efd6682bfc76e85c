"""What became of a night, in one sentence: not what the gate would allow, but what happened."""

from __future__ import annotations

from configs.schema.gates import REPORT_LABEL
from tasks.night_state import NightState
from training.evaluation.decision import GateDecision


def headline(state: NightState, decision: GateDecision | None) -> str:
    """The first line of every page about the night."""
    if state.status == "failed":
        return f"failed: {state.reason or 'no reason is noted'}"
    if decision is None:
        return state.reason or state.status
    if state.promoted:
        return f"{promoted_as(state.version)}; {_why_promoted(state, decision)}"
    if decision.promote:
        return f"not promoted, although {_held(decision)}: {state.reason or 'the champion stays'}"
    return f"not promoted: {decision.sentence}" + (f" {state.reason}" if state.reason else "")


def promoted_as(version: str | None) -> str:
    """How the headline of a night that promoted begins: true of that night, so other pages say it in the past."""
    return f"promoted: version {version} is champion"


def _why_promoted(state: NightState, decision: GateDecision) -> str:
    if decision.promote:
        return _held(decision)
    return f"{state.reason or 'forced by a person'}, although the gate says {decision.sentence}"


def _held(decision: GateDecision) -> str:
    """`all 3 blocking rules hold`, and what was told or skipped beside them."""
    blocking = [rule for rule in decision.rules if rule.severity == "block" and rule.label != REPORT_LABEL]
    skipped = [rule.label for rule in decision.rules if rule.verdict == "SKIPPED"]
    judged = sum(rule.verdict != "SKIPPED" for rule in blocking)
    count = f"all {judged} blocking rules hold" if judged > 1 else "the one blocking rule holds"
    told = [f"{rule.label} {rule.verdict} ({rule.severity})" for rule in decision.told]
    return "; ".join(
        [
            count,
            *([f"told without blocking: {', '.join(told)}"] if told else []),
            *([f"skipped, because there was no champion yet: {', '.join(skipped)}"] if skipped else []),
        ]
    )

"""Gate, register and promote in MLflow: a nested run each, like the stages that run as child processes.

Everything is read from the night's state and its files, so it can be sent late, and again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tasks.judging import FOLDER, stored_decision
from tasks.night_state import StageNote
from training.evaluation.decision import CheckOutcome, GateDecision, RuleOutcome

if TYPE_CHECKING:
    from tasks.night_work import NightWork

GATE, REGISTER, PROMOTE = "gate", "register", "promote"


@contextmanager
def acting(night: NightWork, act: str) -> Iterator[None]:
    """Show an act as running, and note how it ended and its seconds of wall clock."""
    night.tracker.attempt(f"start of {act}", lambda: night.tracker.run.start_stage(act))
    started = time.monotonic()
    try:
        yield
    except Exception:
        _note(night, act, StageNote(how="failed", seconds=time.monotonic() - started, ended=time.time()))
        raise
    _note(night, act, StageNote(how="done", seconds=time.monotonic() - started, ended=time.time()))


def publish_acts(night: NightWork) -> None:
    """Figures, tags and files of every act so far; ends their runs."""
    for act, note in night.state.acts.items():
        night.tracker.attempt(f"results of {act}", functools.partial(_publish, night, act, note))


def rule_metrics(decision: GateDecision) -> dict[str, float]:
    """`<rule>/passed` (1 or 0) of every rule that was judged, and value, interval and limit of its decisive check."""
    metrics: dict[str, float] = {}
    for rule in decision.rules:
        if rule.verdict == "SKIPPED":
            continue
        check = _decisive(rule)
        metrics[f"{rule.label}/passed"] = float(rule.verdict == "PASS")
        numbers = {"value": check.value, "low": check.low, "high": check.high, "limit": check.limit, "n": check.n}
        metrics |= {f"{rule.label}/{name}": float(number) for name, number in numbers.items() if number is not None}
    return metrics


def _decisive(rule: RuleOutcome) -> CheckOutcome:
    """The check that the rule's verdict and sentence come from."""
    return next(check for check in rule.checks if check.verdict == rule.verdict)


def _note(night: NightWork, act: str, note: StageNote) -> None:
    night.note(acts={**night.state.acts, act: note.model_dump()})


def _publish(night: NightWork, act: str, note: StageNote) -> None:
    run, state = night.tracker.run, night.state
    metrics, tags = {"seconds": note.seconds}, {"nightjar.verdict": state.verdict or ""}
    if act == GATE:
        decision = stored_decision(night.book, state.night)
        metrics |= rule_metrics(decision)
        tags |= {f"rule.{rule.label}": rule.verdict for rule in decision.rules}
        run.log_artifact(night.folder / FOLDER, FOLDER, GATE)
    elif state.version is not None:
        alias = "champion" if act == PROMOTE and state.promoted else "challenger"
        tags |= {"nightjar.version": state.version, "nightjar.alias": alias, "nightjar.model": night.site.model}
        tags |= {"nightjar.previous": state.champion.version} if state.champion is not None else {}
    ended = note.ended or state.ended
    run.finish_act(act, "FINISHED" if note.how == "done" else "FAILED", metrics, tags, ended)

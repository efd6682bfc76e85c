"""What earlier nights still owe MLflow, because it was away, is sent at the next start: everything lies on disk."""

from __future__ import annotations

from pathlib import Path

from configs.errors import NightjarError
from tasks.judging import read_report, stored_decision
from tasks.launch import StageRun
from tasks.night_state import NightBook, NightState
from tasks.night_tracking import NightTracker
from tasks.night_work import NightWork
from tasks.publish import publish_failed_validation, publish_judgement, publish_summary, publish_validation
from tasks.site import Site
from tasks.summary import summarise


def catch_up(book: NightBook) -> list[str]:
    """Send what is owed. One sentence a night; what cannot be sent even now stays owed."""
    owing = [state for state in book.nights() if state.owed and state.status != "running"]
    return [_catch_up(book, state) for state in owing]


def _catch_up(book: NightBook, state: NightState) -> str:
    try:
        config = book.config(state.night)
        site = Site.open(book.home, config.registry)
        night = NightWork(config, book, site, NightTracker.open(site, state.night, config), state)
        night.reload()
        _send(night)
    except NightjarError as error:
        return f"night {state.night} still owes MLflow {len(state.owed)} thing(s): {error.message}"
    if night.state.owed:
        return f"night {state.night} still owes MLflow: {', '.join(night.state.owed)}"
    return f"night {state.night}: what MLflow had missed was sent"


def _send(night: NightWork) -> None:
    for stage, note in night.state.stages.items():
        if stage in night.results:
            directory = Path(note.directory)
            done = StageRun(night.results[stage], directory, reused=False, attempts=0, seconds=note.seconds)
            night.tracker.stage_done(stage, done, note.ended or night.state.ended)
    if "validate" in night.results:
        publish_validation(night)
    elif "validate" in night.state.stages:
        publish_failed_validation(night)
    report, decision = None, None
    if night.state.verdict is not None and night.materials.report is not None:
        report = read_report(Path(night.materials.report.path))
        decision = stored_decision(night.book, night.state.night)
        publish_judgement(night, report)
    publish_summary(night, summarise(night.state, night.config, night.results, report, decision))
    night.finish("FAILED" if night.state.status == "failed" else "FINISHED")

"""The night's key lines in Prefect's own log, throttled: a person at the flow run's page sees what goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger

from flows.console import event_words, moved_words
from tasks.progress import Progress
from tasks.summary import NightSummary

_SECONDS = 60.0
_ORDINARY = frozenset({"validating", "round", "best_round", "early_stop"})
"""Events that belong to every good night; whatever else a stage tells is a warning."""


class FlowLog:
    """Passes everything on to `then`, and writes the lines that matter to the flow run's log."""

    def __init__(self, then: Progress, log: logging.Logger | logging.LoggerAdapter[Any] | None = None) -> None:
        self._then = then
        self._log = log or get_run_logger()
        self._told = 0.0

    def stage_started(self, stage: str, attempt: int) -> None:
        """Logged."""
        self._told = time.monotonic()
        self._log.info("%s starts, attempt %d", stage, attempt)
        self._then.stage_started(stage, attempt)

    def stage_moved(self, stage: str, step: int, total: int, shown: Mapping[str, float], doing: str = "") -> None:
        """Logged once a minute."""
        if time.monotonic() - self._told >= _SECONDS:
            self._told = time.monotonic()
            self._log.info("%s %s", stage, moved_words(step, total, shown, doing))
        self._then.stage_moved(stage, step, total, shown, doing)

    def stage_event(self, stage: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Logged; as a warning unless it is ordinary: an attempt died, a guard fired, a checkpoint was refused."""
        level = logging.INFO if kind in _ORDINARY else logging.WARNING
        self._log.log(level, "%s: %s", stage, event_words(kind, fields))
        self._then.stage_event(stage, kind, fields)

    def stage_ended(self, stage: str, how: str, seconds: float) -> None:
        """Logged."""
        self._log.info("%s %s after %.1f s", stage, how, seconds)
        self._then.stage_ended(stage, how, seconds)

    def note(self, text: str) -> None:
        """Logged."""
        self._log.info("%s", text)
        self._then.note(text)

    def summary(self, summary: NightSummary) -> None:
        """The headline is logged; the page is an artifact."""
        self._log.info("%s: %s", summary.night, summary.headline)
        self._then.summary(summary)

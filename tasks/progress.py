"""What a night tells while it runs: the listener's shape, and reading a stage's metrics.jsonl as it grows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from training.contract import METRICS

if TYPE_CHECKING:
    from tasks.summary import NightSummary


class Progress(Protocol):
    """Hears how the night goes. Implementations must not raise: a broken screen ends no night."""

    def stage_started(self, stage: str, attempt: int) -> None:
        """A child process of `stage` starts; `attempt` counts from 1."""

    def stage_moved(self, stage: str, step: int, total: int, shown: Mapping[str, float], doing: str = "") -> None:
        """`step` of `total` is done; `shown` are the few numbers worth seeing live. `doing`: a phase before or after
        the steps, such as "teacher scores".
        """

    def stage_event(self, stage: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Something a person wants to know: a guard fired, an attempt died, a checkpoint was refused."""

    def stage_ended(self, stage: str, how: str, seconds: float) -> None:
        """`how` is done, reused, skipped or failed; `seconds` of wall clock in this night."""

    def note(self, text: str) -> None:
        """A sentence about the night as a whole."""

    def summary(self, summary: NightSummary) -> None:
        """The page at the night's end, also at the end of one that failed."""


class Silent:
    """Hears and says nothing."""

    def stage_started(self, stage: str, attempt: int) -> None:
        """Say nothing."""

    def stage_moved(self, stage: str, step: int, total: int, shown: Mapping[str, float], doing: str = "") -> None:
        """Say nothing."""

    def stage_event(self, stage: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Say nothing."""

    def stage_ended(self, stage: str, how: str, seconds: float) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def summary(self, summary: NightSummary) -> None:
        """Say nothing."""


_LISTENER: ContextVar[Progress | None] = ContextVar("nightjar_progress", default=None)


def listener() -> Progress:
    """Who listens in this context; nobody by default."""
    return _LISTENER.get() or Silent()


@contextmanager
def listening(progress: Progress) -> Iterator[Progress]:
    """Send what happens inside the block to `progress`."""
    token = _LISTENER.set(progress)
    try:
        yield progress
    finally:
        _LISTENER.reset(token)


class MetricsTail:
    """Follows a metrics.jsonl that another process appends to, and hands on progress and events.

    Starts at the file's present end, so a resumed stage repeats nothing. A file that became shorter (the child rewound
    to its checkpoint) is followed from its new end.
    """

    _QUIET_KINDS = frozenset({"checkpoint"})

    def __init__(self, directory: Path, stage: str, progress: Progress) -> None:
        self._path = directory / METRICS
        self._stage = stage
        self._progress = progress
        self._position = self._size()

    def poll(self) -> None:
        """Hand on every line that is complete by now."""
        size = self._size()
        if size < self._position:
            self._position = size
        if size == self._position:
            return
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            new = stream.read(size - self._position)
        whole, newline, _ = new.rpartition(b"\n")
        self._position += len(whole) + len(newline)
        for line in whole.splitlines():
            self._hand_on(line)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _hand_on(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:  # the middle of a line that was there before a rewind
            return
        kind = record.pop("event", None) if isinstance(record, dict) else None
        if kind == "progress":
            shown, doing = record.get("shown") or {}, record.get("doing") or ""
            self._progress.stage_moved(self._stage, record["step"], record["total"], shown, doing)
        elif kind is not None and kind not in self._QUIET_KINDS:
            record.pop("time", None)
            self._progress.stage_event(self._stage, kind, record)

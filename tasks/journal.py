"""The journal: what became champion, when, instead of whom, and what was taken back. It, not the registry, knows.

MLflow's aliases are last-writer-wins with no history; "version minus one" is a guess. Every change of the champion is
announced here (`pending`, `rollback_pending`) before the alias moves and closed (`verified`, `reverted`, `rolled_back`)
after it was read back, so that whoever comes next knows what a killed process was about to do.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

from tasks.append_log import AppendLog
from tasks.registry_errors import JournalError

Event = Literal["pending", "verified", "reverted", "rollback_pending", "rolled_back", "retired"]
JOURNAL = "journal.jsonl"
_OPENING = ("pending", "rollback_pending")
_CLOSING = ("verified", "reverted", "rolled_back")


@dataclass(frozen=True)
class Entry:
    """One line of the journal. Versions are the registry's, as strings.

    Promotion (`pending`, `verified`, `reverted`): `candidate` replaces `previous` (null: there was none).
    Rollback (`rollback_pending`, `rolled_back`, `reverted`): `restored` replaces `taken_down`.
    `act` is the same in all lines of one act. `digest` is the sha256 of the candidate's or taken down weights.

    Example: {"seq": 7, "event": "pending", "model": "nightjar-policy", "act": "3f0c...", "previous": "3",
    "candidate": "4", "night": "2025-06-01", "digest": "9ab1...", "time": "2025-06-01T04:12:09Z"}
    """

    event: Event
    model: str
    act: str
    previous: str | None = None
    candidate: str | None = None
    taken_down: str | None = None
    restored: str | None = None
    night: str | None = None
    digest: str | None = None
    why: str | None = None
    by: str | None = None
    forced: bool = False
    time: str = ""
    seq: int = 0


@dataclass
class _Standing:
    """What the lines of one model add up to."""

    champions: list[str] = field(default_factory=list)
    banned: dict[str, str | None] = field(default_factory=dict)
    open: dict[str, Entry] = field(default_factory=dict)
    last_closed: Entry | None = None


class Journal:
    """Reads and writes `<home>/journal.jsonl`. Every question is answered by reading the file again."""

    def __init__(self, home: Path) -> None:
        self.log = AppendLog(home / JOURNAL)

    def write(self, entry: Entry) -> Entry:
        """Append one line, durable when this returns."""
        stamped = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        shown = {key: value for key, value in asdict(entry).items() if value not in (None, False, "", 0)}
        record = self.log.append(shown | {"time": stamped})
        return _entry(record)

    def entries(self, model: str | None = None) -> list[Entry]:
        """All entries, oldest first, of one model or of all."""
        found = [_entry(record) for record in self.log.read().records]
        return [entry for entry in found if model is None or entry.model == model]

    def torn_lines(self) -> int:
        """Fragments left by writers that died inside a line; a problem to report, never a record."""
        return self.log.read().torn

    def champions(self, model: str) -> tuple[str, ...]:
        """Versions a rollback may still return to, oldest first; the last is the champion as the journal knows it."""
        return tuple(self._standing(model).champions)

    def previous_champion(self, model: str, current: str | None = None) -> str | None:
        """Whom a rollback of `current` restores (null: of the journal's own champion); None when there is nobody."""
        standing = self._standing(model)
        leaving = current if current is not None else (standing.champions[-1] if standing.champions else None)
        return next((v for v in reversed(standing.champions) if v != leaving and v not in standing.banned), None)

    def unfinished(self, model: str | None = None) -> list[Entry]:
        """Acts that were announced and never closed: their process died, or is at it now (ask the lock)."""
        models = [model] if model is not None else sorted({entry.model for entry in self.entries()})
        return [entry for name in models for entry in self._standing(name).open.values()]

    def banned_versions(self, model: str) -> dict[str, str | None]:
        """Versions that were rolled back and not forced since, with the sha256 of their weights."""
        return dict(self._standing(model).banned)

    def is_banned(self, model: str, version: str, digest: str | None) -> bool:
        """Whether this version, or the same weights under another number, was rolled back before."""
        banned = self.banned_versions(model)
        return version in banned or (digest is not None and digest in banned.values())

    def protected(self, model: str) -> set[str]:
        """Versions that retention must keep: everything a rollback or reconcile may still need."""
        standing = self._standing(model)
        waiting = {v for e in standing.open.values() for v in (e.previous, e.candidate, e.taken_down, e.restored) if v}
        return set(standing.champions) | waiting

    def last_closed(self, model: str) -> Entry | None:
        """The newest act that ended."""
        return self._standing(model).last_closed

    def _standing(self, model: str) -> _Standing:
        return _add_up(self.entries(model))


def new_act() -> str:
    """An identifier that ties the lines of one act together."""
    return uuid.uuid4().hex


def _add_up(entries: Iterable[Entry]) -> _Standing:
    standing = _Standing()
    for entry in entries:
        if entry.event in _OPENING:
            standing.open[entry.act] = entry
        if entry.event in _CLOSING:
            standing.open.pop(entry.act, None)
            standing.last_closed = entry
        if entry.event == "verified" and entry.candidate is not None:
            _promoted(standing, entry)
        if entry.event == "rolled_back" and entry.restored is not None:
            _rolled_back(standing, entry)
        if entry.event == "retired":
            standing.champions = [v for v in standing.champions if v != entry.taken_down]
    return standing


def _promoted(standing: _Standing, entry: Entry) -> None:
    assert entry.candidate is not None
    if entry.forced:
        lifted = standing.banned.get(entry.candidate) or entry.digest
        same = {v for v, digest in standing.banned.items() if v == entry.candidate or (digest and digest == lifted)}
        standing.banned = {v: digest for v, digest in standing.banned.items() if v not in same}
    # A previous champion that the journal has not seen was promoted by hand; it is still where a rollback leads.
    if entry.previous is not None and entry.previous not in standing.champions[-1:]:
        standing.champions = [v for v in standing.champions if v != entry.previous] + [entry.previous]
    standing.champions = [v for v in standing.champions if v != entry.candidate] + [entry.candidate]


def _rolled_back(standing: _Standing, entry: Entry) -> None:
    assert entry.restored is not None
    if entry.taken_down is not None:
        standing.banned[entry.taken_down] = entry.digest
    if entry.restored in standing.champions:
        del standing.champions[standing.champions.index(entry.restored) + 1 :]
    else:
        standing.champions = [v for v in standing.champions if v != entry.taken_down] + [entry.restored]


def _entry(record: object) -> Entry:
    assert isinstance(record, dict)
    known = {item.name for item in fields(Entry)}
    try:
        return Entry(**{key: value for key, value in record.items() if key in known})
    except TypeError as error:
        raise JournalError(
            f"{JOURNAL}: entry {record.get('seq', '?')} is damaged: {error}",
            "restore the file from a backup; nothing is promoted or rolled back before that",
        ) from None

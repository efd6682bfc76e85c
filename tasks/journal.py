"""The journal: what became champion, when, instead of whom, and what was taken back. It, not the registry, knows.

MLflow's aliases are last-writer-wins with no history; "version minus one" is a guess. Every change of the champion is
announced here (`pending`, `rollback_pending`) before the alias moves and closed (`verified`, `reverted`, `rolled_back`)
after it was read back, so that whoever comes next knows what a killed process was about to do.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from tasks.append_log import AppendLog
from tasks.registry_errors import JournalError

Event = Literal["pending", "verified", "reverted", "rollback_pending", "rolled_back", "retired", "adopted"]
JOURNAL = "journal.jsonl"
DAMAGED = (
    "nothing is promoted or rolled back before that: restore the file from a backup, or move it aside and run "
    "`nightjar reconcile --adopt --why TEXT`, which takes the registry as it is"
)
_OPENING = ("pending", "rollback_pending")
_CLOSING = ("verified", "reverted", "rolled_back")


@dataclass(frozen=True)
class Entry:
    """One line of the journal. Versions are the registry's, as strings.

    Promotion (`pending`, `verified`, `reverted`): `candidate` replaces `previous` (null: there was none).
    Rollback (`rollback_pending`, `rolled_back`, `reverted`): `restored` replaces `taken_down`.
    Adoption (`adopted`): a person takes the registry as it is; `champions` (the last is the present one) and `banned`
    (version -> sha256 of its weights) hold from here on, whatever was before. `ever_taken_down`: all that were rolled
    back once, also those that a person has put back since and that are therefore not banned.
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
    champions: tuple[str, ...] = ()
    banned: Mapping[str, str | None] = field(default_factory=dict)
    ever_taken_down: tuple[str, ...] = ()
    time: str = ""
    seq: int = 0


_ENTRY = TypeAdapter(Entry)
_EMPTY: tuple[object, ...] = (None, False, "", 0, (), {})


@dataclass
class Standing:
    """What the lines of one model add up to.

    `champions`: whom a rollback may return to, oldest first, the last being champion; `banned`: rolled back and not
    forced since, with the sha256 of their weights; `open`: announced and not closed, by act. `promoted` (with their
    sha256, null where it is not known), `taken_down` and `retired`: every version that ever was. `adopted`: when the
    registry was last taken as it is, empty for never. `last_change`: the newest act that ended with another champion;
    `last_closed` may be one that was reverted.
    """

    champions: list[str] = field(default_factory=list)
    banned: dict[str, str | None] = field(default_factory=dict)
    promoted: dict[str, str | None] = field(default_factory=dict)
    taken_down: set[str] = field(default_factory=set)
    retired: set[str] = field(default_factory=set)
    adopted: str = ""
    open: dict[str, Entry] = field(default_factory=dict)
    last_closed: Entry | None = None
    last_change: Entry | None = None

    def bans(self, version: str) -> bool:
        """Whether it, or the same weights under another number, was rolled back and not forced since."""
        weights = self.promoted.get(version)
        return version in self.banned or (weights is not None and weights in self.banned.values())


class Journal:
    """Reads and writes `<home>/journal.jsonl`. Every question is answered by reading the file again."""

    def __init__(self, home: Path) -> None:
        self.log = AppendLog(home / JOURNAL, DAMAGED)

    def write(self, entry: Entry) -> Entry:
        """Append one line, durable when this returns."""
        stamped = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        shown = {key: value for key, value in asdict(entry).items() if value not in _EMPTY}
        record = self.log.append(shown | {"time": stamped})
        return self._entry(record, int(record["seq"]))

    def entries(self, model: str | None = None) -> list[Entry]:
        """All entries, oldest first, of one model or of all."""
        read = self.log.read()
        found = [self._entry(record, line) for record, line in zip(read.records, read.lines, strict=True)]
        return [entry for entry in found if model is None or entry.model == model]

    def torn_lines(self) -> int:
        """Fragments left by writers that died inside a line, sealed or not: never a record."""
        return self.log.read().torn

    def champions(self, model: str) -> tuple[str, ...]:
        """Versions a rollback may still return to, oldest first; the last is the champion as the journal knows it."""
        return tuple(self.standing(model).champions)

    def previous_champion(self, model: str, current: str | None = None) -> str | None:
        """Whom a rollback of `current` restores (null: of the journal's own champion); None when there is nobody.

        The newest that was champion before `current`. Where a person has moved the alias back by hand, that is not the
        version it was moved away from.
        """
        standing = self.standing(model)
        before = standing.champions[:-1] if current is None else standing.champions
        if current in standing.champions:
            before = standing.champions[: standing.champions.index(current)]
        return next((version for version in reversed(before) if not standing.bans(version)), None)

    def unfinished(self, model: str | None = None) -> list[Entry]:
        """Acts that were announced and never closed: their process died, or is at it now (ask the lock)."""
        models = [model] if model is not None else sorted({entry.model for entry in self.entries()})
        return [entry for name in models for entry in self.standing(name).open.values()]

    def banned_versions(self, model: str) -> dict[str, str | None]:
        """Versions that were rolled back and not forced since, with the sha256 of their weights."""
        return dict(self.standing(model).banned)

    def is_banned(self, model: str, version: str, digest: str | None) -> bool:
        """Whether this version, or the same weights under another number, was rolled back before."""
        banned = self.banned_versions(model)
        return version in banned or (digest is not None and digest in banned.values())

    def protected(self, model: str) -> set[str]:
        """Versions that retention keeps: all that a rollback, also one to a named version, or reconcile may need."""
        standing = self.standing(model)
        passed = set(standing.promoted) - set(standing.banned)
        waiting = {v for e in standing.open.values() for v in (e.previous, e.candidate, e.taken_down, e.restored) if v}
        return set(standing.champions) | passed | waiting

    def last_closed(self, model: str) -> Entry | None:
        """The newest act that ended."""
        return self.standing(model).last_closed

    def standing(self, model: str) -> Standing:
        """What the journal knows of a model. Raises JournalError."""
        return _add_up(self.entries(model))

    def _entry(self, record: Mapping[str, Any], line: int) -> Entry:
        known = {item.name for item in fields(Entry)}
        try:
            return _ENTRY.validate_python({key: value for key, value in record.items() if key in known})
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise JournalError(
                f"{self.log.path}: line {line}: entry {record.get('seq', '?')} is damaged: {what}", DAMAGED
            ) from None


def new_act() -> str:
    """An identifier that ties the lines of one act together."""
    return uuid.uuid4().hex


def _add_up(entries: Iterable[Entry]) -> Standing:
    standing = Standing()
    for entry in entries:
        if entry.event in _OPENING:
            standing.open[entry.act] = entry
        if entry.event in _CLOSING:
            standing.open.pop(entry.act, None)
            standing.last_closed = entry
            standing.last_change = standing.last_change if entry.event == "reverted" else entry
        if entry.event == "verified" and entry.candidate is not None:
            _promoted(standing, entry)
        if entry.event == "rolled_back" and entry.restored is not None:
            _rolled_back(standing, entry)
        if entry.event == "retired" and entry.taken_down is not None:
            standing.retired.add(entry.taken_down)
            standing.champions = [v for v in standing.champions if v != entry.taken_down]
        if entry.event == "adopted":
            _adopted(standing, entry)
    return standing


def _adopted(standing: Standing, entry: Entry) -> None:
    """What was before is no longer believed, digests and open acts included."""
    standing.champions, standing.banned, standing.open = list(entry.champions), dict(entry.banned), {}
    standing.promoted = dict.fromkeys([*entry.champions, *entry.banned])
    standing.taken_down = {*entry.banned, *entry.ever_taken_down}
    standing.adopted = entry.time


def _promoted(standing: Standing, entry: Entry) -> None:
    assert entry.candidate is not None
    standing.promoted[entry.candidate] = entry.digest
    if entry.forced:
        lifted = standing.banned.get(entry.candidate) or entry.digest
        same = {v for v, digest in standing.banned.items() if v == entry.candidate or (digest and digest == lifted)}
        standing.banned = {v: digest for v, digest in standing.banned.items() if v not in same}
    # A previous champion that the journal has not seen was promoted by hand; it is still where a rollback leads.
    if entry.previous is not None and entry.previous not in standing.champions[-1:]:
        standing.champions = [v for v in standing.champions if v != entry.previous] + [entry.previous]
    standing.champions = [v for v in standing.champions if v != entry.candidate] + [entry.candidate]


def _rolled_back(standing: Standing, entry: Entry) -> None:
    assert entry.restored is not None
    if entry.taken_down is not None:
        standing.banned[entry.taken_down] = entry.digest
        standing.taken_down.add(entry.taken_down)
    if entry.restored in standing.champions:
        del standing.champions[standing.champions.index(entry.restored) + 1 :]
    else:
        standing.champions = [v for v in standing.champions if v != entry.taken_down] + [entry.restored]

"""The steps of a drill, in order. Each returns what was seen, in words, or raises."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from configs.credentials import without_credentials
from configs.errors import NightjarError
from configs.schema.registry import WatchConfig, WatchLimit
from tasks.drill_scratch import Scratch
from tasks.preflight import check_tracking
from tasks.promotion import promote
from tasks.reconcile import reconcile
from tasks.registry import CHALLENGER, PREVIOUS
from tasks.registry_errors import BannedVersion, RollbackRefused, StoredBytesDiffer
from tasks.rollback import rollback
from tasks.version_tags import ROLLBACK_REASON
from tasks.watching import record_watch

LENGTH = "answer_length"
WATCH = WatchConfig(limits=[WatchLimit(metric=LENGTH, min=1.0)], patience=2)


class DrillFailed(NightjarError, AssertionError):
    """What was seen is not what has to be; the registry of the drill is removed all the same."""


@dataclass(frozen=True)
class Exercise:
    """A step: its name, what it does in words, and the act, which returns what was seen."""

    name: str
    done: str
    act: Callable[[Scratch], str]


def reach(scratch: Scratch) -> str:
    """MLflow is there."""
    check_tracking(scratch.site.tracking_uri, scratch.site.config.reach_timeout_seconds)
    scratch.reached = True
    where = without_credentials(scratch.site.tracking_uri) if scratch.on_server else "a new database"
    return f"{where} answers"


def register(scratch: Scratch) -> str:
    """The first version is a challenger, and nobody's champion."""
    version = scratch.register(1)
    scratch.good = version.number
    _expect_alias(scratch, CHALLENGER, scratch.good)
    _expect_champion(scratch, None)
    return f"version {scratch.good} is challenger; every stored byte was read back and compared"


def promote_first(scratch: Scratch) -> str:
    """It becomes champion, and answers through the alias."""
    promote(scratch.site, scratch.good, judged_against=None)
    _expect_champion(scratch, scratch.good)
    _expect_events(scratch, "pending", "verified")
    scratch.answers = scratch.ask()
    _expect(all(scratch.answers), f"the champion has nothing to say: {scratch.answers}")
    return f"version {scratch.good} is champion; it answers {scratch.answers[0]!r}"


def refuse_changed_bytes(scratch: Scratch) -> str:
    """A version whose stored bytes were changed after the upload is not promoted."""
    version = scratch.register(2)
    scratch.change_a_byte(version)
    before = scratch.events()
    said = _refused(StoredBytesDiffer, lambda: promote(scratch.site, version.number, judged_against=scratch.good))
    _expect_champion(scratch, scratch.good)
    _expect(scratch.events() == before, "the journal announced a promotion of changed bytes")
    return f"refused ({said}); version {scratch.good} stays champion"


def kill_a_promotion(scratch: Scratch) -> str:
    """Killed after the alias moved, a promotion leaves an open line in the journal."""
    scratch.bad = scratch.register(3, silent=True).number
    status = scratch.killed_promotion(scratch.bad, scratch.good)
    log = scratch.home / "killed.txt"
    said = log.read_text(encoding="utf-8", errors="replace")[-500:] if log.exists() else ""
    _expect(status == -signal.SIGKILL, f"the promotion ended with status {status} instead of SIGKILL: {said}")
    _expect_champion(scratch, scratch.bad)
    _expect(scratch.events()[-1:] == ["pending"], f"the journal ends with {scratch.events()[-1:]}")
    return f"the alias names version {scratch.bad}, and nobody has verified it"


def put_in_order(scratch: Scratch) -> str:
    """The next start puts the previous champion back."""
    reconcile(scratch.site)
    _expect_champion(scratch, scratch.good)
    _expect_events(scratch, "pending", "reverted")
    _expect(scratch.site.journal.unfinished() == [], "an act of the journal is still open")
    _expect_answers(scratch)
    return f"version {scratch.good} is champion again, and answers as before"


def promote_second(scratch: Scratch) -> str:
    """A version that passes every check and is bad all the same becomes champion."""
    promote(scratch.site, scratch.bad, judged_against=scratch.good)
    _expect_champion(scratch, scratch.bad)
    _expect_alias(scratch, PREVIOUS, scratch.good)
    _expect_events(scratch, "pending", "verified")
    return f"version {scratch.bad} is champion, version {scratch.good} previous"


def breach(scratch: Scratch) -> str:
    """Measured again it breaks a limit: once is noise, as often as patience says it must go."""
    for number in range(1, WATCH.patience + 1):
        answers = scratch.ask()
        measured = {LENGTH: sum(map(len, answers)) / len(answers)}
        state = record_watch(scratch.home, scratch.site.model, scratch.bad, measured, WATCH)
        _expect(bool(state.breaches), f"{measured} broke no limit")
        early = state.must_roll_back and number < WATCH.patience
        _expect(not early, f"the watch gave up after {number} of {WATCH.patience}")
    _expect(state.must_roll_back, f"{WATCH.patience} breaches in a row, and the watch has patience left")
    scratch.why = state.why
    return state.why


def roll_back(scratch: Scratch) -> str:
    """The previous champion is back, the bad one carries the reason."""
    rollback(scratch.site, why=scratch.why, away_from=scratch.bad, by="drill")
    _expect_champion(scratch, scratch.good)
    _expect_events(scratch, "rollback_pending", "rolled_back")
    reason = scratch.site.registry.version(scratch.bad).tags.get(ROLLBACK_REASON)
    _expect(reason == scratch.why, f"version {scratch.bad} carries the reason {reason!r}")
    _expect_answers(scratch)
    return f"version {scratch.good} is champion again, and answers as before"


def roll_back_again(scratch: Scratch) -> str:
    """The same breach once more, as a doubled event would bring it, takes nobody else down."""
    before = scratch.events()
    rollback(scratch.site, why=scratch.why, away_from=scratch.bad, by="drill")
    _expect_champion(scratch, scratch.good)
    _expect(scratch.events() == before, "the journal has grown")
    return "nothing changed"


def refuse_the_banned(scratch: Scratch) -> str:
    """What was rolled back is not promoted again by itself."""
    said = _refused(BannedVersion, lambda: promote(scratch.site, scratch.bad, judged_against=scratch.good))
    _expect_champion(scratch, scratch.good)
    return f"refused ({said})"


def refuse_to_end_with_nobody(scratch: Scratch) -> str:
    """There is nobody earlier than the first."""
    said = _refused(RollbackRefused, lambda: rollback(scratch.site, why="one too many", away_from=scratch.good))
    _expect_champion(scratch, scratch.good)
    return f"refused ({said})"


def look_around(scratch: Scratch) -> str:
    """At the end the registry is as a night would like to find it."""
    _expect_answers(scratch)
    left = reconcile(scratch.site)
    _expect(left.nothing_to_do, f"left open: {[*left.settled, *left.closed_runs, *left.problems]}")
    running = scratch.running_runs()
    _expect(running == 0, f"{running} MLflow run(s) are still RUNNING")
    return f"version {scratch.good} answers; no act is open, no run is RUNNING, reconcile finds nothing to do"


STEPS = (
    Exercise("reach MLflow", "ask the store a real question", reach),
    Exercise("register", "log a tiny model, read it back, compare", register),
    Exercise("promote", "make it champion", promote_first),
    Exercise("changed bytes", "change one byte of the next version in the store, promote it", refuse_changed_bytes),
    Exercise("killed promotion", "SIGKILL a promotion after the alias moved", kill_a_promotion),
    Exercise("reconcile", "what every start does first", put_in_order),
    Exercise("promote a bad one", "promote a version that has fallen silent", promote_second),
    Exercise("breach", f"measure it {WATCH.patience} times", breach),
    Exercise("roll back", "as the watch does when its patience is used up", roll_back),
    Exercise("roll back again", "the same event a second time", roll_back_again),
    Exercise("promote the banned", "promote the bad version again, without force", refuse_the_banned),
    Exercise("roll back further", "take the last sound version down", refuse_to_end_with_nobody),
    Exercise("look around", "ask the champion, reconcile, count runs", look_around),
)


def _expect(held: bool, otherwise: str) -> None:
    if not held:
        raise DrillFailed(otherwise)


def _expect_champion(scratch: Scratch, version: str | None) -> None:
    found = scratch.champion
    _expect(found == version, f"the champion is {_name(found)}, and should be {_name(version)}")


def _expect_alias(scratch: Scratch, alias: str, version: str) -> None:
    found = scratch.site.registry.alias(alias)
    _expect(found == version, f"alias {alias} names {_name(found)}, and should name version {version}")


def _expect_events(scratch: Scratch, *last: str) -> None:
    found = scratch.events()[-len(last) :]
    _expect(found == list(last), f"the journal ends with {', '.join(found) or 'nothing'} instead of {', '.join(last)}")


def _expect_answers(scratch: Scratch) -> None:
    found = scratch.ask()
    _expect(found == scratch.answers, f"the champion answers {found}, and answered {scratch.answers} before")


def _refused(kind: type[NightjarError], act: Callable[[], object]) -> str:
    """The refusal's own words; anything else it raises goes on."""
    try:
        act()
    except kind as refusal:
        return refusal.message.splitlines()[0]
    raise DrillFailed(f"it was not refused ({kind.__name__} was due)")


def _name(version: str | None) -> str:
    return "nobody" if version is None else f"version {version}"

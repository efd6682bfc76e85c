"""Which night it is: go on with one that broke off, skip, or begin a new one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.schema import NightConfig
from tasks.night_seeds import first_night_with, night_seed
from tasks.night_state import NightBook, NightState
from tasks.spent_states import drop_spent_states

_DAY = "%Y-%m-%d"


@dataclass(frozen=True)
class Opened:
    """A night to run. `continued` when it had begun before."""

    state: NightState
    continued: bool


@dataclass(frozen=True)
class NothingToDo:
    """No night, and the sentence that says why."""

    reason: str


@dataclass(frozen=True)
class Source:
    """The night's data as the decision needs it: bring the partition of night k, and tell what is there now."""

    deliver: Callable[[int], None]
    fingerprint: Callable[[], str]


def open_night(book: NightBook, config: NightConfig, source: Source, again: bool = False) -> Opened | NothingToDo:
    """Decide, and write the state of the night that is opened. The lock must be held.

    A killed night with this config is continued; a failed one as well, unless new data has come since (then its data
    will not mend itself, and the new data gets its own night). `again` starts a new night in any case. When a new night
    begins, the checkpoints of the chain's earlier ones are dropped: none of them is continued any more.
    """
    states = book.nights(config.name)
    index = book.next_index(config.name)
    if not again:
        unfinished = _unfinished(states, config.config_hash)
        if unfinished is not None and unfinished.status == "running":
            return Opened(unfinished, continued=True)
        if unfinished is not None and unfinished.fingerprint == _fingerprint_or_nothing(source):
            anew = book.change(unfinished, status="running", ended=None, reason=None, verdict=None, acts={})
            return Opened(anew, continued=True)
    # A night that came to no verdict has not used up its data.
    source.deliver(1 + sum(state.status == "finished" for state in states))
    fingerprint = source.fingerprint()
    if not again:
        same = _judged_before(states, config.config_hash, fingerprint)
        if same is not None:
            # What decides no result may have changed: the watch reads its limits from the newest night's config.
            book.save_config(same.night, config)
            return NothingToDo(f"no new data since night {same.night}, and nothing that decides a result has changed")
    _close_abandoned(book, states)
    drop_spent_states(book.folder(state.night) for state in states)
    first = first_night_with(fingerprint, [(state.index, state.fingerprint) for state in states], index)
    state = NightState(
        night=f"{config.name}-{index:04d}",
        index=index,
        name=config.name,
        config_hash=config.config_hash,
        fingerprint=fingerprint,
        seed=night_seed(config.seed, index),
        data_seed=night_seed(config.seed, first),
        started=time.time(),
    )
    return Opened(book.save(state), continued=False)


def same_snapshot_before(book: NightBook, state: NightState, snapshot_sha256: str) -> NightState | None:
    """The last judged night of this chain when it had this very snapshot and config: other files, the same rows."""
    last = _last_judged([earlier for earlier in book.nights(state.name) if earlier.night != state.night])
    if last is None or last.snapshot_sha256 != snapshot_sha256 or last.config_hash != state.config_hash:
        return None
    return last


def is_stale(scheduled: float, now: float, limit_hours: float) -> bool:
    """Whether a start that was due at `scheduled` (seconds since 1970) is too old to run: a newer one catches up."""
    return now - scheduled > limit_hours * 3600.0


def caught_up_since(book: NightBook, name: str, due: float, now: float) -> NightState | None:
    """The night of this chain that began after `due` and came to its end: a start that was due then has no work left.

    Moments are seconds since 1970. A night that lies ahead of `now` was dated by a clock that has been set back since.
    """
    began = [s for s in book.nights(name) if due < s.started <= now and s.status in ("finished", "skipped")]
    return began[-1] if began else None


def _unfinished(states: Sequence[NightState], config_hash: str) -> NightState | None:
    last = states[-1] if states else None
    wanted = last is not None and last.status in ("running", "failed") and last.config_hash == config_hash
    return last if wanted else None


def _fingerprint_or_nothing(source: Source) -> str | None:
    from training.errors import DataError

    try:
        return source.fingerprint()
    except DataError:  # nothing delivered yet, or the source is gone: the new night's own checks say it in words
        return None


def _judged_before(states: Sequence[NightState], config_hash: str, fingerprint: str) -> NightState | None:
    last = _last_judged(states)
    same = last is not None and last.config_hash == config_hash and last.fingerprint == fingerprint
    return last if same else None


def _last_judged(states: Sequence[NightState]) -> NightState | None:
    judged = [state for state in states if state.status in ("finished", "skipped")]
    return judged[-1] if judged else None


def _close_abandoned(book: NightBook, states: Sequence[NightState]) -> None:
    """A night that broke off and will not be continued must not look as if it still ran: the lock is ours."""
    for state in states:
        if state.status == "running":
            reason = "broke off, and was not continued: the configuration has changed or a new night was asked for"
            book.change(state, status="failed", ended=time.time(), reason=reason)

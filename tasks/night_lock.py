"""The locks of a night: one night at a time on a home, and one start at a time of a chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.locks import LOCK_OPENS, held_lock, holder_of, night_lock_path
from tasks.registry_errors import LockHeld

LOCK = "night.lock"
ANOTHER_RUNS = "another night is running"


class NightAtWork(LockHeld):
    """A night of the same chain is at work, or waits for its turn: there is nothing left for this one."""


@contextmanager
def only_night(
    home: Path, chain: str, wait_seconds: float = 0.0, tell: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Be the only night of this home. Both locks open when their process is gone.

    Raises NightAtWork, at once, when this chain has a night already. A night of another chain is waited for, which
    `tell` hears; LockHeld when it keeps the home for more than `wait_seconds`: that night has then not been run.
    """
    with ExitStack() as alone:
        _of_chain(alone, home, chain)
        holder = night_at_work(home)
        if holder is not None:
            tell(f"waits for its turn: {holder} is at work on this home")
        _turn(alone, home, chain, wait_seconds)
        yield


def check_alone(home: Path, chain: str) -> None:
    """Raises NightAtWork when this chain has a night right now; nothing is made, and no night is disturbed."""
    holder = holder_of(night_lock_path(home, chain))
    if holder is not None:
        raise NightAtWork(f"a night of {chain} cannot start: its lock is held by {holder}", LOCK_OPENS)


def night_at_work(home: Path) -> str | None:
    """The process that runs a night on this home right now, in words."""
    return holder_of(home / LOCK)


def _of_chain(alone: ExitStack, home: Path, chain: str) -> None:
    try:
        alone.enter_context(held_lock(night_lock_path(home, chain), f"a night of {chain}"))
    except LockHeld as busy:
        raise NightAtWork(busy.message, busy.hint) from None


def _turn(alone: ExitStack, home: Path, chain: str, wait_seconds: float) -> None:
    try:
        alone.enter_context(held_lock(home / LOCK, f"a night of {chain}", wait_seconds))
    except LockHeld as busy:
        raise LockHeld(
            f"a night of {chain} waited {wait_seconds / 60:g} minutes for its turn, and did not run: {busy.message}",
            "give the chains' crons more room or homes of their own, or raise runtime.turn_wait_minutes",
        ) from None

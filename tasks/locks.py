"""Locks that end with their process."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tasks.process_identity import ProcessIdentity
from tasks.registry_errors import LockHeld, LockUnusable

LOCK_OPENS = "wait until it has ended; the lock opens by itself when that process is gone"
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 30.0
"""How long one who only looks may stand in the way; a look takes microseconds, unless its process is stopped in it."""


@contextmanager
def held_lock(path: Path, purpose: str, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold `path` alone. The kernel lets go when the process ends, however it ends; the file stays and means nothing.

    Raises LockHeld naming the holder when another process (or another part of this one) keeps it for `wait_seconds`,
    LockUnusable when the file cannot be made. Those who only look (`holder_of`) are no holders.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LockUnusable(
            f"{purpose} cannot start: {path} cannot be opened: {error.strerror or error}",
            "make its folder writable with room on its disk, or set NIGHTJAR_HOME or runtime.home to one that is",
        ) from None
    try:
        _take(descriptor, path, purpose, time.monotonic() + wait_seconds)
        _sign(descriptor, purpose)
        yield
    finally:
        os.close(descriptor)


def holder_of(path: Path) -> str | None:
    """Who holds `path` right now, in words; None when nobody does. Makes nothing, and refuses nobody the lock.

    The look is a shared lock for a moment: several may look at once, and `held_lock` tells them from a holder.
    Raises LockUnusable when the file cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise LockUnusable(f"{path} cannot be read: {error.strerror or error}", "let this user read it") from None
    try:
        return None if _is_free_of_holders(descriptor) else _holder(descriptor)
    finally:
        os.close(descriptor)


def model_lock_path(home: Path, model: str) -> Path:
    """Where promotions, rollbacks, reconcile and retention of one model meet."""
    return _lock_path(home / "locks", model)


def night_lock_path(home: Path, chain: str) -> Path:
    """Where the starts of one chain meet."""
    return _lock_path(home / "locks" / "nights", chain)


def watch_lock_path(home: Path, model: str) -> Path:
    """Where the measurements of one model's champion meet."""
    return _lock_path(home / "locks" / "watches", model)


def run_lock_path(home: Path, run: str) -> Path:
    """By what a Prefect flow run shows that its process is alive; one that is gone holds nothing."""
    return _lock_path(home / "locks" / "flow-runs", run)


def slug(name: str) -> str:
    """`name` as the name of a file, another one for every name: chains `a.b` and `a_b` must not lock each other out."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _lock_path(folder: Path, name: str) -> Path:
    return folder / f"{slug(name)}.lock"


def _take(descriptor: int, path: Path, purpose: str, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if _is_over(descriptor, deadline):
                raise LockHeld(
                    f"{purpose} cannot start: {path} is held by {_holder(descriptor)}",
                    LOCK_OPENS,
                ) from None
        time.sleep(_POLL_SECONDS)


def _is_over(descriptor: int, deadline: float) -> bool:
    """Whether waiting is over: at the deadline, or a little later when nobody holds the lock and somebody looks."""
    late = time.monotonic() - deadline
    return late >= 0 and (late > _LOOK_SECONDS or not _is_free_of_holders(descriptor))


def _is_free_of_holders(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _sign(descriptor: int, purpose: str) -> None:
    content = json.dumps(asdict(ProcessIdentity.current()) | {"purpose": purpose}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"{holder['purpose']} (pid {holder['pid']} on {holder['host']})"
    except (ValueError, KeyError):
        return "another process"

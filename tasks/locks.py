"""Locks that end with their process, and a way to tell whether a process of another day still lives."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.registry_errors import LockHeld

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POLL_SECONDS = 0.1
_SAME_START_SECONDS = 1.0


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that a reused pid cannot impersonate: host, boot, pid and start time (seconds since 1970)."""

    host: str
    boot_id: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> ProcessIdentity:
        """This process."""
        import psutil

        return cls(socket.gethostname(), boot_id(), os.getpid(), psutil.Process().create_time())

    def alive(self) -> bool | None:
        """True or False on this host; None for a process of another host, which only its heartbeat can tell."""
        import psutil

        if self.host != socket.gethostname():
            return None
        if self.boot_id != boot_id():
            return False
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return bool(abs(process.create_time() - self.started) < _SAME_START_SECONDS)
        except psutil.NoSuchProcess:
            return False


def boot_id() -> str:
    """Changes with every start of the machine."""
    if _BOOT_ID.exists():
        return _BOOT_ID.read_text().strip()
    import psutil

    return str(int(psutil.boot_time()))


@contextmanager
def held_lock(path: Path, purpose: str, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold `path` alone. The kernel lets go when the process ends, however it ends; the file stays and means nothing.

    Raises LockHeld naming the holder when another process (or another part of this one) keeps it for `wait_seconds`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(descriptor, path, purpose, time.monotonic() + wait_seconds)
        _sign(descriptor, purpose)
        yield
    finally:
        os.close(descriptor)


def model_lock_path(home: Path, model: str) -> Path:
    """Where promotions, rollbacks, reconcile and retention of one model meet."""
    return home / "locks" / f"{re.sub(r'[^A-Za-z0-9_-]', '_', model)}.lock"


def _take(descriptor: int, path: Path, purpose: str, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LockHeld(
                    f"{purpose} cannot start: {path} is held by {_holder(descriptor)}",
                    "wait until it has ended; the lock opens by itself when that process is gone",
                ) from None
        time.sleep(_POLL_SECONDS)


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

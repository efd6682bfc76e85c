"""One writer at a time, by flock: the kernel releases it when the writer dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from training.errors import StoreError


class WriterLock:
    """Exclusive lock on a file that stays in place. Readers take no lock."""

    def __init__(self, path: Path) -> None:
        """Take the lock, or raise StoreError at once naming the process that holds it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise StoreError(
                f"trajectory store {path.parent}: process {holder} is writing to it",
                "wait until that night has ended, or end that process; a lock left by a dead one is free by itself",
            ) from None
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Give the lock back. Doing it twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

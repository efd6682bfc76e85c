"""The sign of life that a stage's parent gives, so that no child outlives it for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from training.contract import LEASE


@contextmanager
def renewed_lease(directory: Path, lease_seconds: float) -> Iterator[None]:
    """Touch `directory/lease` four times a lease from a thread, as long as the block lasts."""
    stop = threading.Event()
    file = directory / LEASE
    file.touch()

    def renew() -> None:
        while not stop.wait(lease_seconds / 4):
            # A disk that refuses for a moment must not end the thread, and with it the child.
            with suppress(OSError):
                file.touch()

    thread = threading.Thread(target=renew, name="nightjar-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        file.unlink(missing_ok=True)

"""The sign of life that a stage's parent gives, so that no child outlives it for long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.heartbeat import repeated
from training.contract import LEASE


@contextmanager
def renewed_lease(directory: Path, lease_seconds: float) -> Iterator[None]:
    """Touch `directory/lease` four times a lease from a thread, as long as the block lasts; then remove it."""
    file = directory / LEASE
    try:
        with repeated(file.touch, lease_seconds / 4, "nightjar-lease"):
            yield
    finally:
        file.unlink(missing_ok=True)

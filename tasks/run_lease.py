"""Which process answers for a night's MLflow runs, so that runs of a dead one can be told from runs of a living one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.heartbeat import repeated
from tasks.process_identity import ProcessIdentity
from training.contract import write_json

HEARTBEAT_SECONDS = 30.0
STALE_SECONDS = 600.0
"""A lease of another host counts as dead after this long without a heartbeat; on this host the pid decides."""


@dataclass(frozen=True)
class RunLease:
    """A night, the process at it, and its last sign of life (seconds since 1970)."""

    night: str
    owner: ProcessIdentity
    heartbeat: float

    def alive(self, now: float | None = None) -> bool:
        """Whether the owner still lives, as well as can be known from here."""
        known = self.owner.alive()
        return known if known is not None else (now or time.time()) - self.heartbeat < STALE_SECONDS


def leases_folder(home: Path) -> Path:
    """Where the leases lie, one file a night."""
    return home / "leases"


def read_lease(home: Path, night: str) -> RunLease | None:
    """The lease of a night; None when there is none or it cannot be read."""
    try:
        content = json.loads(_file(home, night).read_text(encoding="utf-8"))
        return RunLease(content["night"], ProcessIdentity(**content["owner"]), float(content["heartbeat"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def run_lease(home: Path, night: str, every: float = HEARTBEAT_SECONDS) -> Iterator[None]:
    """Answer for the night's runs as long as the block lasts; a thread renews the heartbeat. Removed at the end."""
    leases_folder(home).mkdir(parents=True, exist_ok=True)
    owner = ProcessIdentity.current()

    def write() -> None:
        write_json(_file(home, night), asdict(RunLease(night, owner, time.time())))

    try:
        # A disk that stays full must not end the night here; on this host the pid decides anyway.
        with repeated(write, every, "nightjar-run-lease"):
            yield
    finally:
        _file(home, night).unlink(missing_ok=True)


def _file(home: Path, night: str) -> Path:
    return leases_folder(home) / f"{night}.json"

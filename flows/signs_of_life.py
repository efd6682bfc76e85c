"""How flow runs show that they live, on a disk that all see: a night and the run it handed a stage to, and any to all.

Prefect's states cannot be relied on for that: a run whose worker was killed stays Running for ever, and a child does
not hear of a parent that was killed. Each side touches a file of its own and looks whether the other's still changes.
Only changes count, never the time they carry: clocks of two machines differ.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.runtime import flow_run

from tasks.lease import renewed_lease
from tasks.locks import held_lock, run_lock_path
from training.contract import LEASE

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handover:
    """The folder of one attempt: spec.json, the night's lease and the run's."""

    folder: Path

    @property
    def night(self) -> Path:
        """Renewed by the night."""
        return self.folder / "night"

    @property
    def run(self) -> Path:
        """Renewed by the run that trains."""
        return self.folder / "run"

    def prepare(self) -> None:
        """Make the folders."""
        self.night.mkdir(parents=True, exist_ok=True)
        self.run.mkdir(parents=True, exist_ok=True)


class Pulse:
    """Seconds since a lease was last seen to change, by this process's own clock."""

    def __init__(self, holder: Path) -> None:
        self._file = holder / LEASE
        self._seen = self._look()
        self._since = time.monotonic()

    def silent_for(self) -> float:
        """Look, and say for how long nothing has changed."""
        now = self._look()
        if now != self._seen and now is not None:
            self._seen, self._since = now, time.monotonic()
        return time.monotonic() - self._since

    def _look(self) -> int | None:
        try:
            return self._file.stat().st_mtime_ns
        except OSError:  # gone, or the disk does not answer: no sign of life
            return None


@contextmanager
def shown_at_work(home: Path, make_home: bool = False) -> Iterator[None]:
    """Hold a lock of this flow run's own while the block runs: reconcile tells by it a run whose process is gone.

    Where there is no home most runs have nothing to do; then nothing is made, except by one that is to `make_home`.
    Raises LockUnusable when the home cannot be written.
    """
    run = flow_run.id
    if not run or not (make_home or home.is_dir()):
        yield
        return
    file = run_lock_path(home, str(run))
    with held_lock(file, f"flow run {run}"):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


@contextmanager
def ending_with_the_night(handover: Handover | None, lease_seconds: float) -> Iterator[None]:
    """Show life while the block runs, and end this process by SIGTERM when the night has shown none for a lease.

    By signal, since the main thread waits for the stage: it ends the stage's processes on its way out.
    """
    if handover is None:
        yield
        return
    handover.prepare()
    stop = threading.Event()
    thread = threading.Thread(
        target=_end_after_silence, args=(Pulse(handover.night), lease_seconds, stop), name="night-pulse", daemon=True
    )
    with renewed_lease(handover.run, lease_seconds):
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _end_after_silence(pulse: Pulse, lease_seconds: float, stop: threading.Event) -> None:
    while not stop.wait(min(5.0, lease_seconds / 4)):
        if pulse.silent_for() > lease_seconds:
            log.error("the night that asked for this stage shows no life any more: ending")
            os.kill(os.getpid(), signal.SIGTERM)
            return

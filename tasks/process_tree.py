"""Starting a child that can be ended with everything it started, and checking that nothing is left.

Ranks of torchrun live in sessions of their own, so a process group alone does not hold them. Every process of a stage
inherits one environment variable that names the stage directory; that is how strays are found, also those of a parent
that was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from training.errors import StageError

MARK = "NIGHTJAR_STAGE_DIRECTORY"
GRACE_SECONDS = 10.0


def start_child(
    command: Sequence[str],
    directory: Path,
    log: Path,
    environment: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start `command` in its own process group, output appended to `log`, marked with `directory`.

    Not in its own session: what ends the session of the night (a closed terminal, a worker) ends the child as well.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: str(directory.resolve())},
            process_group=0,
        )


def processes_of(directory: Path) -> list[psutil.Process]:
    """Living processes that carry the mark of `directory`, this one excepted."""
    wanted = str(directory.resolve())
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _mark(process) == wanted]


def end_processes(directory: Path, grace_seconds: float = GRACE_SECONDS) -> int:
    """End every process of `directory`: SIGTERM, wait, SIGKILL, wait. Returns how many there were.

    Raises StageError when one survives all that.
    """
    found = processes_of(directory)
    if not found:
        return 0
    _send(found, signal.SIGTERM)
    if _gone_within(directory, grace_seconds):
        return len(found)
    deadline = time.monotonic() + grace_seconds
    # Looked for again each time: a dying launcher may have started something meanwhile.
    while left := processes_of(directory):
        if time.monotonic() > deadline:
            numbers = ", ".join(str(process.pid) for process in left)
            raise StageError(f"processes {numbers} of {directory} cannot be ended", "end them by hand, then run again")
        _send(left, signal.SIGKILL)
        _gone_within(directory, 1.0)
    return len(found)


def _gone_within(directory: Path, seconds: float) -> bool:
    """Wait until no process carries the mark. By looking, not by waiting: an exit status belongs to its parent."""
    deadline = time.monotonic() + seconds
    while processes_of(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _mark(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        mark: str | None = process.environ().get(MARK)
        return mark
    except (psutil.Error, OSError):
        return None


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except (psutil.Error, OSError):
            continue


def how_it_ended(returncode: int) -> str:
    """The end of a process in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    often = "; often the system was out of memory" if name == "SIGKILL" else ""
    return f"ended by {name}{often}"

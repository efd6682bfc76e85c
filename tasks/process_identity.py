"""Telling whether a process of another day still lives, though pids are given out again and clocks are set."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_SAME_START = 1.0
"""Start times closer than this are one: clock ticks are whole numbers, seconds are rounded."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that a reused pid cannot impersonate: host, boot, pid and start.

    `started` is in clock ticks since the boot where there is /proc, which no change of the clock moves; elsewhere in
    seconds since 1970. Example: ProcessIdentity("gpu1", "6f3c...", 4711, 829312).
    """

    host: str
    boot_id: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> ProcessIdentity:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """A living process of this host. Raises ProcessLookupError when there is none."""
        started = _start_of(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(socket.gethostname(), boot_id(), pid, started)

    def alive(self) -> bool | None:
        """True or False on this host; None for a process of another host, which only its heartbeat can tell."""
        if self.host != socket.gethostname():
            return None
        if self.boot_id != boot_id():
            return False
        started = _start_of(self.pid)
        return started is not None and abs(started - self.started) < _SAME_START


def boot_id() -> str:
    """Changes with every start of the machine."""
    if _BOOT_ID.exists():
        return _BOOT_ID.read_text().strip()
    import psutil

    return str(int(psutil.boot_time()))


def _start_of(pid: int) -> float | None:
    """When a process started; None for one that is gone, or is only waiting to be collected."""
    if _BOOT_ID.exists():
        return _ticks_of(pid)
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None


def _ticks_of(pid: int) -> float | None:
    """Field 22 of /proc/PID/stat; psutil would add the boot time, which moves whenever the clock is set."""
    try:
        # The program's name stands in brackets and may hold any character, so fields are counted from its end.
        state, *fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    return None if state in "ZX" else float(fields[18])

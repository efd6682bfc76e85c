"""Stages of the soak's nights: real child processes, forked instead of started, so that imports are paid for once."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_ENDING_SECONDS = 15.0


class ForkedStage:
    """What tasks.launch asks of a started child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, once there is one."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """The exit status. A stage that still runs is ended: forked, it carries no mark by which others find it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        while (status := self.poll()) is None:
            time.sleep(0.005)
        return status


def fork_stage(command: Sequence[str], directory: Path, log: Path, environment: Mapping[str, str]) -> ForkedStage:
    """In the place of tasks.launch.start_child: `python -m MODULE STAGE DIRECTORY` without the start."""
    _, _, module, stage, place = command
    pid = os.fork()
    if pid:
        return ForkedStage(pid)
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 4096)  # the night's lock above all: it must open when the night is gone
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [module, stage, place]
        status = importlib.import_module(module).main()
    finally:
        os._exit(status)


def adopt_orphans() -> None:
    """Whoever loses its parent becomes a child of this process, where it is seen."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def left_over(known: set[int]) -> list[str]:
    """Living children of this process beside `known`, after the time that an orphan takes to notice; then ended."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while (left := _strangers(known)) and time.monotonic() < deadline:
        time.sleep(0.02)
    told = [f"pid {process.pid}: {' '.join(process.cmdline())}" for process in left]
    for process in left:
        process.kill()
    return told


def _strangers(known: set[int]) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE and process.ppid() == os.getpid() and process.pid not in known:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            elif process.pid not in known:
                found.append(process)
    return found

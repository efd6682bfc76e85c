"""Ending a night by Ctrl-C or SIGTERM: the stage's processes first, then Prefect's temporary server, then this one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from flows.embedded import SERVER

INTERRUPTED = 130
_WORDS = "\nstopped; no process of a stage is left. Repeat the command to go on.\n"
_GRACE_SECONDS = 5.0
_ACTIVE: list[bool] = []


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, and end this process at once when the block was interrupted."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    _ACTIVE.append(True)
    try:
        yield
    except BaseException as error:
        if was_interrupted(error):
            _end_now()
        raise
    finally:
        _ACTIVE.pop()
        signal.signal(signal.SIGTERM, before)


def leave_if_embedded(error: BaseException) -> None:
    """Called by a flow that has closed what is its own: end the command here when Prefect has no lasting server.

    A signal to the whole process group (Ctrl-C in a terminal is one) has ended the temporary server too, and Prefect
    would wait minutes for it with its last reports.
    """
    if _ACTIVE and not os.environ.get(SERVER) and was_interrupted(error):
        _end_now()


def was_interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is at the root: Prefect's own errors on its way out may lie on top of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "TerminationSignal":
            return True
        error = error.__cause__ or error.__context__
    return False


def _end_now() -> None:
    """Say so, end the children that are left, and leave without Prefect's farewell."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children = psutil.Process().children(recursive=True)
    for child in children:
        _send(child, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(children, timeout=_GRACE_SECONDS)
    for child in stubborn:
        _send(child, signal.SIGKILL)
    sys.stdout.flush()
    sys.stderr.write(_WORDS)
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def _send(child: psutil.Process, number: signal.Signals) -> None:
    try:
        child.send_signal(number)
    except psutil.NoSuchProcess:
        return

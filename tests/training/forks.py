"""Children by fork, to be killed: the imports are paid for already, and SIGKILL is as real as anywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

KILLED = -signal.SIGKILL


def kill_self() -> NoReturn:
    """What `kill -9` does, from inside."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def kill_at_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but the `number`-th call (from 1) dies instead."""
    calls = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            kill_self()
        return function(*arguments, **options)

    return wrapped


def run_forked(work: Callable[[], object]) -> int:
    """Run `work` in a forked child; returns 0, 1 when it raised (the traceback goes to stderr), or KILLED."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            with contextlib.suppress(Exception):
                traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)

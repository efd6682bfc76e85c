"""Children by fork, to be killed: the imports are paid for already, and SIGKILL is as real as anywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
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
    _, status = os.waitpid(_fork(work), 0)
    return os.waitstatus_to_exitcode(status)


def _fork(work: Callable[[], object]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _make_thread_pool_anew()
            work()
            code = 0
        except BaseException:
            with contextlib.suppress(Exception):
                traceback.print_exc()
        finally:
            os._exit(code)
    return child


def _make_thread_pool_anew() -> None:
    """A forked torch replaces its pool of threads when one is first asked for, and two threads that ask at once (as
    transformers does while it loads) can find none. So it is asked for here, by one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())


def run_ranks(size: int, work: Callable[[], object], seconds: float = 180.0) -> list[int]:
    """Run `work` on `size` forked ranks with the environment of torchrun; exit codes, KILLED when too slow."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(size):
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

        def ranked(named: dict[str, object] = named) -> None:
            os.environ.update({name: str(value) for name, value in named.items()})
            work()

        children.append(_fork(ranked))
    deadline, codes = time.monotonic() + seconds, dict.fromkeys(children, KILLED)
    waiting = set(children)
    while waiting and time.monotonic() < deadline:
        for child in sorted(waiting):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
                waiting.discard(child)
        time.sleep(0.01)
    for child in waiting:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [codes[child] for child in children]

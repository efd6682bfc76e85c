"""A hand that does something to a night while it runs: a thread that waits for its moment on disk, then acts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tasks.process_tree import processes_of

PATIENCE_SECONDS = 600.0
GO = "go"


def until(found: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for it, bounded."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, f"it did not come to that in {seconds:g} s"
        time.sleep(0.02)


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Run `act` beside the block. Its failure is the block's failure: a fault that never struck proves nothing."""
    failure: list[BaseException] = []

    def guarded() -> None:
        try:
            act()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "the hand is still waiting for its moment"
    if failure:
        raise failure[0]


def once_waiting(stage: Path, act: Callable[[], None]) -> Callable[[], None]:
    """When the small stage at `stage` (behaviour `wait`) has come to its pause: act, then let it go on."""

    def run() -> None:
        until((stage / "waiting").exists)
        try:
            act()
        finally:
            (stage.parents[2] / GO).touch()

    return run


def once_checkpointed(stage: Path, act: Callable[[psutil.Process], None], times: int = 1) -> Callable[[], None]:
    """When the stage has written a checkpoint of this attempt: act on its process; again for each later attempt."""

    def run() -> None:
        struck: set[int] = set()
        for _ in range(times):
            before = set(stage.glob("checkpoints/step_*"))
            until(lambda known=before: set(stage.glob("checkpoints/step_*")) - known and _others(stage, struck))
            for process in _others(stage, struck):
                struck.add(process.pid)
                act(process)

    return run


def _others(stage: Path, struck: set[int]) -> list[psutil.Process]:
    return [process for process in processes_of(stage) if process.pid not in struck]

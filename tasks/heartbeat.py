"""A small act that a thread repeats as long as a block lasts: how leases are kept fresh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread


@contextmanager
def repeated(act: Callable[[], None], every: float, name: str) -> Iterator[None]:
    """Call `act` now and then every `every` seconds from a daemon thread `name`, as long as the block lasts.

    Raises what the first call raises. Later an OSError is passed over: a disk that refuses for a moment must not end
    the thread, and with it what depends on the sign of life.
    """
    act()
    stop = Event()
    thread = Thread(target=_repeat, args=(act, every, stop), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _repeat(act: Callable[[], None], every: float, stop: Event) -> None:
    while not stop.wait(every):
        with suppress(OSError):
            act()

"""Seconds of training, without the seconds of measuring it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TrainingClock:
    """CPU seconds of this process since `start`, pauses left out. Other processes on the machine do not count."""

    def __init__(self) -> None:
        self._started = time.process_time()
        self._paused = 0.0

    def start(self) -> None:
        """Begin at 0."""
        self._started, self._paused = time.process_time(), 0.0

    @property
    def seconds(self) -> float:
        """Seconds trained so far."""
        return time.process_time() - self._started - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside is not training."""
        began = time.process_time()
        try:
            yield
        finally:
            self._paused += time.process_time() - began

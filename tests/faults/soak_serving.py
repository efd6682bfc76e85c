"""One serving child for a whole soak: replaced when a night took it down, and brought back into step after a kill."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.serving import ServingWorker
from tasks.site import Site


class SharedServing:
    """Forked nights borrow the child; a night that was killed in the middle of a question leaves its answer behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worker: ServingWorker | None = None

    @contextmanager
    def borrowed(self, site: Site) -> Iterator[ServingWorker]:
        """In the place of Site._new_worker."""
        assert self._worker is not None
        self._worker.tracking_uri = site.tracking_uri
        yield self._worker

    @property
    def pids(self) -> set[int]:
        """The child's, while there is one."""
        process = self._worker._process if self._worker is not None else None
        return {process.pid} if process is not None else set()

    def bring_into_step(self) -> None:
        """Before a fork: the child lives, and its next reply will be to the next question."""
        if self._worker is not None and self._worker.alive and self._drain(self._worker):
            return
        self.end()
        self._worker = ServingWorker("set for each home", self._folder, 900.0).__enter__()
        assert self._drain(self._worker), "a fresh serving child does not answer"

    def end(self) -> None:
        """End the child."""
        if self._worker is not None:
            self._worker.__exit__(None, None, None)
            self._worker = None

    @staticmethod
    def _drain(worker: ServingWorker) -> bool:
        """Ask for something that does not exist, and read on until that is the answer."""
        process, mark = worker._process, uuid.uuid4().hex
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"op": mark}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return False
        while reply := worker._read_line():
            if mark.encode() in reply:
                return True
        return False

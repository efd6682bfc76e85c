"""A night's view in MLflow that never stops the night: what cannot be sent now is sent later, from files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.schema import NightConfig
from tasks.delivery import deliver_metrics
from tasks.launch import StageRun
from tasks.registry_errors import RegistryError, TrackingUnavailable
from tasks.site import Site
from tasks.tracking import NightRun

DELIVER_SECONDS = 10.0
MEMORY = ("peak_memory_mb", "peak_gpu_memory_mb")
log = logging.getLogger(__name__)


class NightTracker:
    """The parent run and one nested run a stage. Only `open` may raise: it happens before any compute."""

    def __init__(self, run: NightRun) -> None:
        self.run = run
        self.late: list[str] = []

    @classmethod
    def open(cls, site: Site, night: str, config: NightConfig) -> NightTracker:
        """Start or resume the night's run. Raises TrackingUnavailable."""
        return cls(NightRun.open(site, night, config))

    @contextmanager
    def following(self, stage: str, directory: Path) -> Iterator[None]:
        """Send the stage's metrics while it runs; a stage that raises is shown as FAILED."""
        self.attempt(f"start of {stage}", lambda: self.run.start_stage(stage))
        stop = threading.Event()
        thread = threading.Thread(target=self._deliver, args=(stage, directory, stop), daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            _end(thread, stop)
            self.attempt(f"end of {stage}", lambda: self._finish(stage, directory, "FAILED", {}))
            raise
        _end(thread, stop)

    def stage_done(self, stage: str, done: StageRun) -> None:
        """The rest of the metrics, and the final numbers: the stage's own, its seconds and its peak memory."""
        result = done.result
        memory = {name: value for name, value in result.facts.items() if name in MEMORY}
        metrics = {**result.metrics, "wall_seconds": result.wall_seconds, **memory}
        self.attempt(f"results of {stage}", lambda: self._finish(stage, done.directory, "FINISHED", metrics))

    def attempt(self, what: str, act: Callable[[], object]) -> None:
        """Do it; when MLflow is away or refuses, remember that it is owed. No display is worth a night."""
        try:
            act()
        except Exception as error:
            self.late.append(what)
            log.warning("%s could not be shown in MLflow now (%s: %s)", what, type(error).__name__, error)

    def finish(self, status: str) -> None:
        """End the parent run: FINISHED, FAILED or KILLED."""
        self.attempt("end of the night", lambda: self.run.finish(status))

    def _finish(self, stage: str, directory: Path, status: str, metrics: dict[str, float | None]) -> None:
        sent = deliver_metrics(directory, self.run.destination(stage), final=True)
        if sent.late is not None:
            raise TrackingUnavailable(sent.late)
        self.run.finish_stage(stage, status, metrics)

    def _deliver(self, stage: str, directory: Path, stop: threading.Event) -> None:
        while not stop.wait(DELIVER_SECONDS):
            try:
                deliver_metrics(directory, self.run.destination(stage), final=False)
            except (TrackingUnavailable, RegistryError, OSError):
                continue  # the last delivery, at the stage's end, catches up


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    thread.join()

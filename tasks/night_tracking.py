"""A night's view in MLflow that never stops the night: what cannot be sent now is sent later, from files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from configs.schema import NightConfig
from tasks.delivery import deliver_metrics
from tasks.launch import StageRun
from tasks.mlflow_client import briefly
from tasks.registry_errors import RegistryError, TrackingUnavailable
from tasks.site import Site
from tasks.tracking import NightRun

DELIVER_SECONDS = 10.0
MEMORY = ("peak_memory_mb", "peak_gpu_memory_mb")
AWAY_SECONDS = 300.0
"""A server that did not answer is not asked again for this long: every question would hold the night up."""
END_SECONDS = 60.0
"""A delivery that has not come back after this long is left behind: its server is away."""
log = logging.getLogger(__name__)


class NightTracker:
    """The parent run and one nested run a stage. Only `open` may raise: it happens before any compute."""

    def __init__(self, run: NightRun) -> None:
        self.run = run
        self.late: list[str] = []
        self._away_until = 0.0

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
            self._end(thread, stop)
            self.attempt(f"end of {stage}", lambda: self._finish(stage, directory, "FAILED", {}))
            raise
        self._end(thread, stop)

    def stage_done(self, stage: str, done: StageRun, ended: float | None = None) -> None:
        """The rest of the metrics, and the final numbers: the stage's own, its seconds and its peak memory.

        `ended`: when the stage was over, in seconds since 1970; null: now.
        """
        result = done.result
        memory = {name: value for name, value in result.facts.items() if name in MEMORY}
        metrics = {**result.metrics, "wall_seconds": result.wall_seconds, **memory}
        self.attempt(f"results of {stage}", lambda: self._finish(stage, done.directory, "FINISHED", metrics, ended))

    def attempt(self, what: str, act: Callable[[], object], *, uploads: bool = False, always: bool = False) -> None:
        """Do it; when MLflow is away or refuses, remember that it is owed. No display is worth a night.

        `uploads`: with MLflow's own patience, since big files take their time; `always`: also soon after a silence.
        """
        if self.is_away and not always:
            self.late.append(what)
            return
        try:
            with nullcontext() if uploads else briefly():
                act()
        except Exception as error:
            if isinstance(error, TrackingUnavailable):
                self._went_away()
            self.late.append(what)
            log.warning("%s could not be shown in MLflow now (%s: %s)", what, type(error).__name__, error)

    @property
    def is_away(self) -> bool:
        """Whether MLflow has been silent a short while ago."""
        return time.monotonic() < self._away_until

    def finish(self, status: str, ended: float | None = None) -> None:
        """End the parent run, at `ended` (null: now): FINISHED, FAILED or KILLED.

        Always tried, since it notes the wish on disk first.
        """
        self.attempt("end of the night", lambda: self.run.finish(status, ended), always=True)

    def _went_away(self) -> None:
        # A database file is never away: somebody has locked it for a moment, and says so within seconds.
        if not self.run.site.tracking_uri.startswith("sqlite:"):
            self._away_until = time.monotonic() + AWAY_SECONDS

    def _finish(
        self,
        stage: str,
        directory: Path,
        status: str,
        metrics: dict[str, float | None],
        ended: float | None = None,
    ) -> None:
        sent = deliver_metrics(directory, self.run.destination(stage), final=True)
        if sent.late is not None:
            raise TrackingUnavailable(sent.late)
        self.run.finish_stage(stage, status, metrics, ended)

    def _deliver(self, stage: str, directory: Path, stop: threading.Event) -> None:
        while not stop.wait(DELIVER_SECONDS):
            if self.is_away:
                continue
            try:
                with briefly():
                    sent = deliver_metrics(directory, self.run.destination(stage), final=False)
            except TrackingUnavailable:
                self._went_away()
            except (RegistryError, OSError):
                continue  # the last delivery, at the stage's end, catches up
            else:
                if sent.late is not None:
                    self._went_away()

    def _end(self, thread: threading.Thread, stop: threading.Event) -> None:
        stop.set()
        thread.join(END_SECONDS)
        if thread.is_alive():
            self._went_away()

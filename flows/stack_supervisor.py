"""Keeping the services of the native stack alive: start in order, look after their health, restart, end in reverse."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from configs.errors import NightjarError
from flows.stack_postgres import as_user
from flows.stack_services import Service
from tasks.process_tree import MARK, end_processes
from training.contract import write_json

STATE = "state.json"
LOGS = "logs"
_START_SECONDS = 600.0
_TICK_SECONDS = 1.0
_LOOK_SECONDS = 10.0
_LONGEST_PAUSE = 60.0


@dataclass
class _Watched:
    """A service at work."""

    service: Service
    process: subprocess.Popen[bytes] | None = None
    healthy: bool = False
    restarts: int = 0
    answered: float = 0.0
    not_before: float = 0.0
    started: float = 0.0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Runs until it is told to stop. `<folder>/state.json` says at any time how things are."""

    def __init__(self, folder: Path, services: Sequence[Service], look_every: float = _LOOK_SECONDS) -> None:
        self._folder = folder
        self._watched = [_Watched(service) for service in services]
        self._stop = threading.Event()
        self._look_every = look_every
        (folder / LOGS).mkdir(parents=True, exist_ok=True)

    def stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """End soon. A signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Start all, look after them, end all. Raises NightjarError when one does not come up."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        try:
            self._end_strays()
            self._tell("starting")
            for together in self._waves():
                for watched in together:
                    self._start(watched)
                for watched in together:
                    self._await_health(watched)
                    if self._stop.is_set():
                        return
                    self._tell("starting")
            self._tell("running")
            self._look_after()
        finally:
            self._end_all()
            self._tell("stopped")

    def _waves(self) -> list[list[_Watched]]:
        """In order; those that stand beside each other are started together."""
        waves: list[list[_Watched]] = []
        for watched in self._watched:
            if watched.service.beside and waves:
                waves[-1].append(watched)
            else:
                waves.append([watched])
        return waves

    def _look_after(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(_TICK_SECONDS):
            due = time.monotonic() - looked >= self._look_every
            looked = time.monotonic() if due else looked
            before = [(watched.alive, watched.healthy, watched.restarts) for watched in self._watched]
            for watched in self._watched:
                self._look_at(watched, due)
            if before != [(watched.alive, watched.healthy, watched.restarts) for watched in self._watched]:
                self._tell("running")

    def _look_at(self, watched: _Watched, due: bool) -> None:
        if not watched.alive:
            watched.healthy = False
            if time.monotonic() >= watched.not_before:
                self._restart(watched)
            return
        if not due and watched.healthy:
            return
        if self._answers(watched):
            watched.healthy, watched.answered = True, time.monotonic()
            return
        watched.healthy = False
        patience = watched.service.hung_after
        if patience is not None and time.monotonic() - watched.answered > patience:
            print(f"{watched.service.name} hangs: it is started again", flush=True)  # noqa: T201
            self._end(watched)

    @staticmethod
    def _answers(watched: _Watched) -> bool:
        """Whether it is healthy, and was made ready if it has only now become so. Whatever goes wrong is a no."""
        try:
            if not watched.service.healthy():
                return False
            if not watched.healthy:
                watched.service.ready()
        except (NightjarError, OSError, subprocess.SubprocessError) as error:
            print(f"{watched.service.name}: {type(error).__name__}: {error}", flush=True)  # noqa: T201
            return False
        return True

    def _restart(self, watched: _Watched) -> None:
        """At once the first time, then after pauses that grow while it keeps dying young."""
        lived = time.monotonic() - watched.started
        if watched.process is not None:
            code = watched.process.returncode
            told = f"{watched.service.name} ended with {code} after {lived:.0f} s: starting again"
            print(told, flush=True)  # noqa: T201
        watched.restarts = watched.restarts + 1
        self._start(watched)
        pause = 0.0 if lived > _LONGEST_PAUSE else min(_LONGEST_PAUSE, 2.0 ** min(watched.restarts, 6))
        watched.not_before = time.monotonic() + pause

    def _start(self, watched: _Watched) -> None:
        service = watched.service
        if not service.spares_children:
            end_processes(self._mark(service))
        with (self._folder / LOGS / f"{service.name}.log").open("ab") as log:
            watched.process = subprocess.Popen(
                service.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**service.environment, MARK: str(self._mark(service))},
                cwd="/",
                start_new_session=True,
                **as_user(service.user),
            )
        watched.started = watched.answered = time.monotonic()
        self._pid_file(service).write_text(f"{watched.process.pid}\n", encoding="utf-8")

    def _await_health(self, watched: _Watched) -> None:
        service = watched.service
        while not self._stop.is_set():
            if not watched.alive:
                raise NightjarError(
                    f"{service.name} ended at once: {self._last_words(service)}", self._log_hint(service)
                )
            if self._answers(watched):
                watched.healthy = True
                return
            if time.monotonic() - watched.started > _START_SECONDS:
                raise NightjarError(f"{service.name} did not answer in {_START_SECONDS:.0f} s", self._log_hint(service))
            self._stop.wait(0.3)

    def _end_all(self) -> None:
        for watched in reversed(self._watched):
            self._end(watched)
        self._end_strays()

    def _end(self, watched: _Watched) -> None:
        """Its own clean end first; whatever carries its mark after that is killed."""
        if watched.alive and watched.process is not None:
            watched.process.send_signal(watched.service.stop)
            try:
                watched.process.wait(watched.service.grace)
            except subprocess.TimeoutExpired:
                os.killpg(watched.process.pid, signal.SIGKILL)
                watched.process.wait()
        watched.healthy = False
        end_processes(self._mark(watched.service))
        self._pid_file(watched.service).unlink(missing_ok=True)

    def _end_strays(self) -> None:
        """Processes of a supervisor that was killed."""
        for watched in self._watched:
            end_processes(self._mark(watched.service))

    def _mark(self, service: Service) -> Path:
        return (self._folder / "services" / service.name).resolve()

    def _pid_file(self, service: Service) -> Path:
        return self._folder / f"{service.name}.pid"

    def _last_words(self, service: Service) -> str:
        log = self._folder / LOGS / f"{service.name}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
        words = lines[-1][:400] if lines else "it said nothing"
        for secret in service.secrets:
            words = words.replace(secret, "***")
        return words

    def _log_hint(self, service: Service) -> str:
        return f"read {self._folder / LOGS / f'{service.name}.log'}"

    def _tell(self, how: str) -> None:
        services: dict[str, Any] = {}
        for watched in self._watched:
            pid = watched.process.pid if watched.alive and watched.process is not None else None
            services[watched.service.name] = {"pid": pid, "healthy": watched.healthy, "restarts": watched.restarts}
        write_json(self._folder / STATE, {"stack": how, "time": time.time(), "services": services})

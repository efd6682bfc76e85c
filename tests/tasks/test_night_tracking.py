"""Showing a night in MLflow: no call holds the night up, and what was not shown is owed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks import mlflow_client, night_tracking
from tasks.mlflow_client import briefly, connect
from tasks.night_tracking import NightTracker
from tasks.registry import answering
from tasks.registry_errors import RegistryError, TrackingUnavailable

TIMEOUT, RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


class Silent:
    """A server that takes connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.calls: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                self.calls.append(self._socket.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIMEOUT, raising=False)
    monkeypatch.setenv(RETRIES, "3")  # what connect() sets


def tracker_of(uri: str = "http://mlflow:5000", **run: Any) -> NightTracker:
    return NightTracker(cast(Any, SimpleNamespace(site=SimpleNamespace(tracking_uri=uri), **run)))


def away(*given: object) -> None:
    raise TrackingUnavailable("MLflow does not answer")


def test_a_silent_server_is_asked_once_and_then_owed(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_client, "_BRIEF", {TIMEOUT: "1", RETRIES: "0"})
    client, tracker = connect(silent.uri), tracker_of()

    def ask() -> None:
        with answering(silent.uri):
            client.get_run("r")

    tracker.attempt("first", ask)
    assert tracker.is_away
    asked = len(silent.calls)
    tracker.attempt("second", ask)
    assert tracker.late == ["first", "second"]
    assert len(silent.calls) == asked == 1


def test_display_is_brief_and_uploads_keep_mlflows_patience() -> None:
    seen: list[tuple[str | None, str | None]] = []
    tracker = tracker_of()

    def look() -> None:
        seen.append((os.environ.get(TIMEOUT), os.environ.get(RETRIES)))

    tracker.attempt("a metric", look)
    tracker.attempt("an artifact", look, uploads=True)
    assert seen == [("15", "1"), (None, "3")]
    assert (os.environ.get(TIMEOUT), os.environ.get(RETRIES)) == (None, "3")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "40")
    with briefly():
        assert os.environ[TIMEOUT] == "40"
    assert os.environ[TIMEOUT] == "40"


def test_two_threads_inside_leave_the_environment_as_it_was() -> None:
    first, second = briefly(), briefly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ[TIMEOUT] == "15"
    second.__exit__(None, None, None)
    assert TIMEOUT not in os.environ


def test_after_a_while_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    tracker = tracker_of()
    tracker.attempt("first", away)
    now = night_tracking.time.monotonic()
    monkeypatch.setattr(night_tracking.time, "monotonic", lambda: now + night_tracking.AWAY_SECONDS + 1)
    tracker.attempt("second", lambda: done.append("second"))
    assert (done, tracker.late) == (["second"], ["first"])


def test_a_refusal_is_no_silence() -> None:
    def refuse() -> None:
        raise RegistryError("no such run")

    tracker = tracker_of()
    tracker.attempt("first", refuse)
    assert not tracker.is_away


def test_a_locked_database_is_asked_again_at_once() -> None:
    tracker = tracker_of("sqlite:////home/mlflow.db")
    tracker.attempt("first", away)
    assert not tracker.is_away


def test_the_end_is_noted_even_while_mlflow_is_away() -> None:
    ended: list[str] = []
    tracker = tracker_of(finish=lambda status, when: ended.append(status))
    tracker.attempt("first", away)
    tracker.finish("FINISHED")
    assert ended == ["FINISHED"]


def test_a_delivery_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night_tracking, "DELIVER_SECONDS", 0.01)
    monkeypatch.setattr(night_tracking, "END_SECONDS", 0.01)
    hanging, free = threading.Event(), threading.Event()

    def destination(stage: str) -> None:
        hanging.set()
        free.wait()
        raise TrackingUnavailable("at last")

    tracker = tracker_of(start_stage=lambda stage: None, destination=destination)
    with tracker.following("sft", tmp_path):
        assert hanging.wait(60)
    assert tracker.is_away
    free.set()

"""The drill on real registries: it passes and leaves nothing; with a fault planted it fails, and says where."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest
from rich.console import Console

from flows.drill_command import FAILED, PASSED, run_drill
from tasks import drill_steps, promotion, reconcile, site, watching
from tasks import rollback as rollback_module
from tasks.drill import Step, drill
from tasks.drill_scratch import Scratch
from tasks.drill_steps import STEPS
from tasks.mlflow_client import connect
from tasks.rollback import Rollback
from tasks.serving import ServingWorker
from tasks.site import Site

NAMES = [exercise.name for exercise in STEPS] + ["clean up"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def prepared(
    temporary: Path, empty_database: Path, shared_worker: ServingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's tables come from a copy, and the serving child is the session's: both take longer than the rest."""
    make = Scratch.make

    def made(on_server: bool) -> Scratch:
        scratch = make(on_server)
        shutil.copy(empty_database, scratch.home / "mlflow.db")
        return scratch

    @contextmanager
    def borrowed(of: Site) -> Iterator[ServingWorker]:
        shared_worker.tracking_uri = of.tracking_uri
        yield shared_worker

    monkeypatch.setattr(Scratch, "make", made)
    monkeypatch.setattr(Site, "_new_worker", borrowed)


def assert_nothing_left(temporary: Path) -> None:
    assert list(temporary.iterdir()) == []
    left = []
    for process in psutil.process_iter():
        try:
            if str(temporary) in " ".join([*process.cmdline(), *process.environ().values()]):
                left.append(process.cmdline())
        except (psutil.Error, OSError):
            continue
    assert left == []


def told(steps: list[Step]) -> str:
    return "\n".join(f"{step.outcome}: {step.name}: {step.seen}" for step in steps)


@pytest.mark.slow
def test_it_passes_and_leaves_nothing_behind(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody there, and nobody may be asked
    console = Console(record=True, width=200)
    assert run_drill(on_server=False, console=console) == PASSED, console.export_text()
    shown = console.export_text()
    assert all(name in shown for name in NAMES)
    assert "answer_length is 0, below 1" in shown
    assert f"drill passed: {len(NAMES)} steps" in shown
    assert_nothing_left(temporary)


@pytest.mark.slow
def test_on_a_server_under_a_name_of_its_own(
    temporary: Path, tmp_path: Path, start_server: Callable[..., Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    folder = tmp_path / "server"
    folder.mkdir()
    start_server(folder, port, f"127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    mine = connect(f"http://127.0.0.1:{port}")
    mine.create_registered_model("somebody-else")
    steps = list(drill(on_server=True))
    assert [step.outcome for step in steps] == ["ok"] * len(NAMES), told(steps)
    assert [model.name for model in mine.search_registered_models()] == ["somebody-else"]
    assert [experiment.name for experiment in mine.search_experiments()] == ["Default"]
    assert [file for file in (folder / "store").rglob("*") if file.is_file()] == []
    assert_nothing_left(temporary)


def test_a_server_that_is_not_named_is_asked_for(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(Exception, match="MLFLOW_TRACKING_URI names no server"):
        list(drill(on_server=True))
    assert_nothing_left(temporary)


def test_a_server_that_is_away_fails_the_first_step(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    steps = list(drill(on_server=True))
    assert [step.outcome for step in steps] == ["failed", *["not run"] * (len(NAMES) - 2), "ok"], told(steps)
    assert "does not answer" in steps[0].seen
    assert_nothing_left(temporary)


def nothing(*given: Any, **named: Any) -> list[Any]:
    return []


def says_it_rolled_back(scratch_site: Any, *, away_from: str, **named: Any) -> Rollback:
    return Rollback(True, away_from, "1", "version 3 was rolled back to version 1")


def impatient(*given: Any) -> Any:
    return replace(watching.record_watch(*given), consecutive=99)


FAULTS = {
    "changed bytes": (site, "check_unchanged", nothing),
    "reconcile": (reconcile, "settle_unfinished", nothing),
    "promote a bad one": (promotion, "tidy", nothing),
    "breach": (drill_steps, "record_watch", impatient),
    "roll back": (drill_steps, "rollback", says_it_rolled_back),
    "promote the banned": (promotion, "_refuse_banned", nothing),
    "roll back again": (rollback_module, "_already_done", lambda *given: None),
    "roll back further": (rollback_module, "_target", lambda of, current, to: "1" if current == "3" else "3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("step", FAULTS)
def test_a_fault_in_the_product_fails_the_drill(
    temporary: Path, prepared: None, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    where, what, instead = FAULTS[step]
    monkeypatch.setattr(where, what, instead)
    console = Console(record=True, width=200)
    assert run_drill(on_server=False, console=console) == FAILED
    shown = console.export_text()
    assert f"drill failed at {step}:" in shown
    assert "not run" in shown
    assert_nothing_left(temporary)

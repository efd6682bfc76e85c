"""The frame around every stage: done work is believed by its hash, failed work leaves no result, orphans end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.forks import run_forked
from tests.training.stages import ROOT, stage_environment
from training import process
from training.__main__ import STAGES, main
from training.context import StageContext, StageOutcome
from training.contract import LEASE, METRICS, RESULT, FileRef, StageSpec, file_ref, read_result, read_spec, write_spec
from training.errors import ContractError, StageError
from training.process import LEASE_SECONDS, describe, die_with_parent, run_stage, watch_lease
from training.recorder import read_lines


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "given.txt").write_text("input")
    inputs = {"given": file_ref(tmp_path / "given.txt")}
    write_spec(tmp_path / "stage", StageSpec("sft", "n", str(tmp_path), 1, {}, inputs))
    return tmp_path / "stage"


def work(context: StageContext) -> StageOutcome:
    """A stage function that counts how often it ran."""
    with (context.directory / "runs").open("a") as runs:
        runs.write("x")
    out = context.output("out.txt")
    out.write_text(context.input("given").read_text().upper())
    context.recorder.record(1, {"loss": 1.0})
    return StageOutcome({"text": out}, {"loss": 1.0, "lost": float("nan")}, {"rows": 3})


def runs(directory: Path) -> int:
    return len((directory / "runs").read_text()) if (directory / "runs").exists() else 0


def test_a_stage_ends_with_its_manifest(directory: Path):
    result = run_stage(directory, work)
    assert result == read_result(directory)
    assert Path(result.output("text").path).read_text() == "INPUT"
    assert result.key == read_spec(directory).key
    assert result.metrics == {"loss": 1.0, "lost": None}
    assert result.facts["rows"] == 3
    assert result.facts["peak_memory_mb"] > 1
    assert "peak_gpu_memory_mb" not in result.facts
    assert result.versions["python"].startswith("3.")
    assert {"torch", "transformers", "peft"} <= set(result.versions)
    assert [line["step"] for line in read_lines(directory / METRICS)] == [1]


def test_done_work_is_not_done_again(directory: Path):
    assert run_stage(directory, work) == run_stage(directory, work)
    assert runs(directory) == 1


def test_a_changed_output_or_spec_is_done_again(directory: Path):
    run_stage(directory, work)
    (directory / "out.txt").write_text("tampered")
    assert Path(run_stage(directory, work).output("text").path).read_text() == "INPUT"
    write_spec(directory, replace(read_spec(directory), seed=2))
    run_stage(directory, work)
    assert runs(directory) == 3


def test_a_changed_input_is_refused_before_any_work(directory: Path):
    (directory.parent / "given.txt").write_text("other")
    with pytest.raises(ContractError, match=r"given.txt: content changed"):
        run_stage(directory, work)
    assert runs(directory) == 0


def test_failed_work_leaves_no_result(directory: Path):
    def fail(context: StageContext) -> StageOutcome:
        context.recorder.record(1, {"loss": 2.0})
        raise StageError("no")

    with pytest.raises(StageError):
        run_stage(directory, fail)
    assert not (directory / RESULT).exists()
    run_stage(directory, work)


def test_an_output_that_was_promised_but_not_written(directory: Path):
    with pytest.raises(ContractError, match=r"gone.txt: no such file"):
        run_stage(directory, lambda context: StageOutcome({"text": context.output("gone.txt")}))
    assert not (directory / RESULT).exists()


def test_other_ranks_write_no_manifest(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    assert run_stage(directory, work).outputs == {}
    assert not (directory / RESULT).exists()
    assert not (directory / METRICS).exists()


def test_a_context_names_what_it_lacks(directory: Path):
    spec = read_spec(directory)
    context = StageContext(directory, spec, None)
    assert context.has_input("given")
    assert not context.has_input("adapter")
    assert context.checkpoints == directory / "checkpoints"
    with pytest.raises(ContractError, match="stage sft was given no input 'adapter'"):
        context.input("adapter")


def test_a_reference_is_described_shortly():
    assert describe(FileRef("folder", "a" * 64, 1)) == "folder@aaaaaaaaaaaa"


def test_every_stage_has_a_function():
    import importlib

    for name, module in STAGES.items():
        assert callable(importlib.import_module(module).run), name


def test_an_error_is_said_in_words_with_code_2(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr("training.__main__.die_with_parent", lambda: None)
    caplog.set_level("ERROR")
    assert main(["sft", str(tmp_path)]) == 2
    assert "ContractError" in caplog.text
    assert "spec.json: missing" in caplog.text


def test_an_unknown_stage_is_a_usage_error(tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["dream", str(tmp_path)])
    assert stop.value.code == 2
    assert "invalid choice: 'dream'" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from training.__main__ import main; main(['--help'])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=stage_environment(), capture_output=True, check=False, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "run one stage by its spec.json" in found.stdout


def test_without_a_renewed_lease_a_stage_ends(tmp_path: Path):
    def orphan() -> None:
        os.environ[LEASE_SECONDS] = "0.4"
        watch_lease(tmp_path)
        time.sleep(60)

    assert run_forked(orphan) == 75


def test_a_lease_that_was_never_renewed_lasts_its_time(tmp_path: Path):
    """The lease file of the run before, hours old, must not end a stage at its start."""
    (tmp_path / LEASE).write_text("")
    os.utime(tmp_path / LEASE, (1, 1))

    def short() -> None:
        os.environ[LEASE_SECONDS] = "30"
        process.time.sleep, nap = (lambda _: nap(0.01)), time.sleep
        watch_lease(tmp_path)
        nap(0.3)

    assert run_forked(short) == 0


def test_a_renewed_lease_keeps_a_stage_alive(tmp_path: Path):
    def renewed() -> None:
        os.environ[LEASE_SECONDS] = "1.5"
        watch_lease(tmp_path)
        for _ in range(25):
            (tmp_path / LEASE).touch()
            time.sleep(0.1)

    assert run_forked(renewed) == 0


def test_without_the_setting_nobody_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import threading

    monkeypatch.delenv(LEASE_SECONDS, raising=False)
    before = threading.active_count()
    watch_lease(tmp_path)
    assert threading.active_count() == before


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_stage_dies_with_whoever_started_it():
    """Parent and stage hold a pipe; once both are gone, and only then, it reads empty."""
    reading, writing = os.pipe()

    def parent() -> None:
        if os.fork() == 0:
            die_with_parent()
            os.write(writing, b"x")
            time.sleep(120)
            os._exit(0)
        os.read(reading, 1)  # the stage has asked for the signal
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_forked(parent) == -signal.SIGKILL
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_childs_peak_is_its_own_and_not_that_of_who_started_it() -> None:
    """getrusage says the parent's peak here: at the start the child shares the parent's memory."""
    mebibytes = 400
    ballast = b"x" * (mebibytes * 2**20)
    script = "from training.process import peak_memory; print(peak_memory()['peak_memory_mb'])"
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 1 < float(child.stdout) < mebibytes / 2
    assert len(ballast) == mebibytes * 2**20

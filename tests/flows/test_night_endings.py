"""How a night ends when what it shows, or the disk below it, fails: through the real flow."""

from __future__ import annotations

import errno

import pytest

from flows import nightly
from tasks.last_config import site_of
from tasks.night_state import NightBook
from tasks.night_work import NightWork
from tasks.registry import CHAMPION

pytestmark = pytest.mark.usefixtures("light_registry")


def state_of(nights, index: int = 1):
    return NightBook(nights.home).load(f"fake-{index:04d}")


def status_in_mlflow(nights) -> str:
    return site_of(nights.home).registry.client.get_run(state_of(nights).mlflow_run_id).info.status


def broken(*given, **named):
    raise ConnectionError("no display answers")


def test_a_promoted_night_ends_well_though_nothing_can_be_shown(nights, monkeypatch) -> None:
    for display in ("publish_judgement", "publish_summary", "report_task"):
        monkeypatch.setattr(nightly, display, broken)
    state = nights.run()
    assert state.is_completed(), state.message
    assert site_of(nights.home).registry.alias(CHAMPION) == "1"
    assert (state_of(nights).status, state_of(nights).promoted) == ("finished", True)
    assert status_in_mlflow(nights) == "FINISHED"
    assert nights.heard.pages, "each display is tried by itself"


def test_a_failed_night_tells_its_own_error_though_the_disk_is_full(nights, monkeypatch) -> None:
    monkeypatch.setenv("NIGHTJAR_FAKE", "base=user_error")
    keep = NightWork.note

    def full(night, **fields):
        if "status" in fields or "owed" in fields:
            raise OSError(errno.ENOSPC, "No space left on device", "night.json")
        keep(night, **fields)

    monkeypatch.setattr(NightWork, "note", full)
    monkeypatch.setattr(nightly, "publish_summary", broken)
    monkeypatch.setattr(nightly, "report_task", broken)
    state = nights.run()
    assert state.is_failed()
    assert "row 7 of pairs.jsonl" in state.message
    assert state_of(nights).status == "running", "so that repeating the command goes on"
    assert status_in_mlflow(nights) == "FAILED"


def test_a_night_that_fails_on_its_data_shows_the_report_and_data_docs(nights, monkeypatch) -> None:
    """The stage writes them, then refuses."""
    monkeypatch.setenv("NIGHTJAR_FAKE", "validate=refuse_data")
    state = nights.run()
    assert state.is_failed()
    client = site_of(nights.home).registry.client
    parent = client.get_run(state_of(nights).mlflow_run_id).info
    (run,) = client.search_runs([parent.experiment_id], "tags.mlflow.runName = 'validate'")
    assert run.info.status == "FAILED"
    folders = [client.list_artifacts(run.info.run_id, folder) for folder in ("validation", "data_docs")]
    shown = [item.path for folder in folders for item in folder]
    assert shown == ["validation/report.json", "validation/report.md", "data_docs/index.html"]


def test_a_full_disk_in_the_night_s_own_process_is_said_in_words(nights, monkeypatch) -> None:
    def full(self, *given):
        raise OSError(errno.ENOSPC, "No space left on device", str(nights.home / "runs/fake-0001/night.json"))

    monkeypatch.setattr(NightWork, "took", full)
    state = nights.run()
    assert state.is_failed()
    assert "night.json could not be written: No space left on device" in state.message
    assert "repeating the command goes on" in state.message
    assert (state_of(nights).status, status_in_mlflow(nights)) == ("failed", "FAILED")

"""Nights while MLflow is away or the alias moves, and the champion measured again afterwards."""

from __future__ import annotations

import pytest

from flows import watch as watch_module
from flows.watch import WatchRequest, watch
from tasks import champion_change
from tasks.last_config import site_of
from tasks.night_state import NightBook
from tasks.registry import CHAMPION
from tasks.registry_errors import PromotionRaced, TrackingUnavailable
from tasks.rollback import Rollback
from tasks.tracking import NightRun

pytestmark = pytest.mark.usefixtures("light_registry")
SHOWING = ("start_stage", "stage_run", "finish_stage", "log_metrics", "log_figures", "log_artifact", "note")


def state_of(nights, index: int):
    return NightBook(nights.home).load(f"fake-{index:04d}")


def stage_runs(nights) -> dict:
    client = site_of(nights.home).registry.client
    found = client.search_runs([client.get_experiment_by_name("nightjar").experiment_id])
    return {run.info.run_name: run for run in found}


def test_what_mlflow_missed_is_sent_at_the_next_start(nights, monkeypatch) -> None:
    def away(*arguments, **named):
        raise TrackingUnavailable("MLflow does not answer")

    with monkeypatch.context() as broken:
        for name in SHOWING:
            broken.setattr(NightRun, name, away)
        assert nights.run("data.quickstart.partitions=1").is_completed(), "training goes on"
    assert state_of(nights, 1).promoted
    assert any("ppo" in owed for owed in state_of(nights, 1).owed)
    assert "ppo" not in stage_runs(nights)

    assert nights.run("data.quickstart.partitions=1").name == "Skipped"
    assert any("what MLflow had missed was sent" in note for note in nights.heard.notes)
    assert state_of(nights, 1).owed == ()
    runs = stage_runs(nights)
    assert runs["ppo"].data.metrics["loss"] == pytest.approx(1 / 3)
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert "Gate" in runs["fake-0001"].data.tags["mlflow.note.content"]


def test_a_race_for_the_alias_fails_the_night_and_the_repetition_judges_anew(nights, monkeypatch) -> None:
    assert nights.run().is_completed()

    def raced(*arguments, **named):
        raise PromotionRaced("somebody else moved the alias")

    with monkeypatch.context() as racing:
        racing.setattr(champion_change, "promote", raced)
        state = nights.run()
    assert state.is_failed()
    assert "moved the alias" in state.message
    failed = state_of(nights, 2)
    assert (failed.status, failed.champion_frozen, failed.started_from.version) == ("failed", False, "1")
    assert (failed.verdict, failed.version) == ("PASS", "2"), "the verdict is kept and shown"
    assert nights.heard.pages[-1].gate

    assert nights.run().is_completed()
    assert state_of(nights, 2).promoted
    assert nights.starts("ppo") == 2, "PPO of the second night was not trained again"


def test_watch_measures_and_takes_down_after_patience(nights, monkeypatch) -> None:
    early = watch(WatchRequest(home=str(nights.home)), return_state=True)
    assert (early.name, early.is_completed()) == ("Skipped", True)
    assert "has seen no night yet" in early.message

    nights.run("watch.limits=[{metric: reward, min: 0.2}]", "watch.patience=2")
    taken_down = []

    def rollback(site, *, why, away_from, by):
        taken_down.append((away_from, by, why))
        return Rollback(True, away_from, "0", "version 0 is champion again")

    monkeypatch.setattr(watch_module, "rollback", rollback)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    kept = watch(WatchRequest(home=str(nights.home)), return_state=True)
    assert kept.is_completed(), kept.message
    monkeypatch.setenv("NIGHTJAR_FAKE", "evaluate=worse")
    first = watch(WatchRequest(home=str(nights.home)), return_state=True)
    assert (first.name, taken_down) == ("Breached", [])
    second = watch(WatchRequest(home=str(nights.home)), return_state=True)
    assert second.name == "Breached"
    assert [(version, by) for version, by, _ in taken_down] == [("1", "watch")]
    assert "reward" in taken_down[0][2]
    assert site_of(nights.home).registry.alias(CHAMPION) == "1"

"""The night's runs: resumed under the same identifiers, described, ended; dead ones closed as KILLED."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.schema import NightConfig
from configs.schema.registry import RegistryConfig
from tasks.finish_late import FinishedLate, finish_late
from tasks.night_params import compared_params
from tasks.night_state import NightBook
from tasks.reconcile import reconcile
from tasks.registry_errors import RegistryError, TrackingUnavailable
from tasks.run_lease import read_lease, run_lease
from tasks.site import Site
from tasks.tracking import DatasetRef, NightRun


@pytest.fixture
def config() -> NightConfig:
    """The shipped quickstart, or the least that a night needs."""
    return NightConfig.model_validate(
        {
            "data": {"source": "pairs.parquet"},
            "models": {"base": "base"},
            "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
        }
    )


def test_compared_params_exist_in_the_config(config: NightConfig) -> None:
    params = compared_params(config.model_dump(mode="json"))
    assert params["ppo.ppo_epochs"] == "4"


def test_a_night_resumes_its_runs(site: Site, config: NightConfig) -> None:
    client = site.registry.client
    first = NightRun.open(site, "n1", config)
    stage = first.stage_run("reward")
    first.finish_stage("reward", metrics={"accuracy": 0.75, "broken": None, "worse": float("nan")})
    first.finish("FAILED")
    assert client.get_run(first.run_id).info.status == "FAILED"

    again = NightRun.open(site, "n1", config)

    assert (again.run_id, again.stage_run("reward")) == (first.run_id, stage)
    assert client.get_run(again.run_id).info.status == "RUNNING"
    run = client.get_run(stage)
    assert run.data.tags["mlflow.parentRunId"] == first.run_id
    assert run.data.metrics == {"final/accuracy": 0.75}
    assert {"nonfinite.final.broken", "nonfinite.final.worse"} <= set(run.data.tags)
    parent = client.get_run(first.run_id)
    assert parent.data.params["ppo.ppo_epochs"] == "4"
    assert len(parent.data.params) < 25
    stored = client.download_artifacts(first.run_id, "config/night.yaml")
    assert "ppo_epochs" in Path(stored).read_text()


def test_runs_are_found_by_their_tags_when_the_file_is_lost(site: Site, config: NightConfig) -> None:
    first = NightRun.open(site, "n1", config)
    stage = first.stage_run("ppo")
    (site.home / "runs" / "n1" / "tracking.json").write_text("{")
    again = NightRun.open(site, "n1", config)
    assert (again.run_id, again.stage_run("ppo")) == (first.run_id, stage)
    assert NightRun.open(site, "n2", config).run_id != first.run_id


def test_a_night_that_moved_to_another_store_starts_a_run_there(
    site: Site, config: NightConfig, empty_database: Path
) -> None:
    first = NightRun.open(site, "n1", config)
    (site.home / "mlflow.db").write_bytes(empty_database.read_bytes())
    fresh = Site.open(site.home, site.config)
    assert NightRun.open(fresh, "n1", config).run_id != first.run_id


def test_a_deleted_experiment_is_named(site: Site, config: NightConfig) -> None:
    client = site.registry.client
    client.delete_experiment(client.create_experiment(site.config.experiment))
    with pytest.raises(RegistryError, match="was deleted in MLflow"):
        NightRun.open(site, "n1", config)


def test_datasets_keep_their_full_hash(site: Site, config: NightConfig) -> None:
    night = NightRun.open(site, "n1", config)
    night.log_datasets([DatasetRef("preferences", "snapshots/abc", "ab" * 32, 77)])
    run = site.registry.client.get_run(night.run_id)
    (entry,) = run.inputs.dataset_inputs
    assert entry.dataset.digest == ("ab" * 32)[:32]
    assert json.loads(entry.dataset.profile) == {"num_rows": 77}
    assert run.data.tags["nightjar.sha256.preferences"] == "ab" * 32


def test_finish_closes_what_is_still_open_below(site: Site, config: NightConfig) -> None:
    night = NightRun.open(site, "n1", config)
    stage = night.stage_run("ppo")
    night.finish()
    assert site.registry.client.get_run(stage).info.status == "KILLED"
    assert site.registry.client.get_run(night.run_id).info.status == "FINISHED"
    night.finish(ended=1000.5)
    assert site.registry.client.get_run(night.run_id).info.end_time == 1_000_500, "told late, it ended when it did"


def test_what_is_told_late_ended_when_it_did(site: Site, config: NightConfig) -> None:
    night, client = NightRun.open(site, "n1", config), site.registry.client
    stage, act, open_one = (night.stage_run(name) for name in ("ppo", "gate", "reward"))
    began = client.get_run(open_one).info.start_time
    for _ in range(2):
        night.finish_stage("ppo", ended=began / 1000 + 60)
        night.finish_act("gate", "FINISHED", {}, {}, began / 1000 + 61)
    night.finish_stage("ppo", metrics={"loss": 1.0})
    night.finish("FAILED", began / 1000 + 62)
    ends = [client.get_run(run).info.end_time for run in (stage, act, open_one, night.run_id)]
    assert ends == pytest.approx([began + 60_000, began + 61_000, began + 62_000, began + 62_000], abs=1)
    night.finish_stage("sft", ended=1000.0)
    made_late = client.get_run(night.stage_run("sft")).info
    assert made_late.end_time == made_late.start_time, "no run ends before it began"


def test_an_end_that_mlflow_missed_is_made_up_for(
    site: Site, config: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = NightRun.open(site, "n1", config)

    def away(*args: object, **kwargs: object) -> None:
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(site.registry.client, "set_terminated", away)
        with pytest.raises(TrackingUnavailable):
            night.finish("FAILED")
    assert finish_late(site).nights == ["n1"]
    assert site.registry.client.get_run(night.run_id).info.status == "FAILED"
    assert finish_late(site) == FinishedLate()


def test_a_night_whose_run_is_lost_keeps_no_other_from_its_end(site: Site, config: NightConfig) -> None:
    """MLflow's database came back from an older backup."""
    there = NightRun.open(site, "n2", config)
    for night, run_id in (("n1", "deadbeef" * 4), ("n2", there.run_id)):
        file = site.home / "runs" / night / "tracking.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"experiment_id": "1", "run_id": run_id, "ending": "FINISHED", "ending_at": 1.7e9, "ended": False}
        file.write_text(json.dumps(state))
    done = finish_late(site)
    assert done.nights == ["n2"]
    assert len(done.problems) == 1
    assert "night n1" in done.problems[0]
    assert site.registry.client.get_run(there.run_id).info.status == "FINISHED"
    assert finish_late(site) == FinishedLate(), "told once"


def test_a_night_is_ended_in_the_mlflow_that_its_own_config_names(
    site: Site, config: NightConfig, make_site: Callable[[Path, RegistryConfig], Site], empty_database: Path
) -> None:
    """Two chains share a home; the other one's server is away when this one starts."""
    book = NightBook(site.home)
    elsewhere = site.home / "other.db"
    shutil.copy(empty_database, elsewhere)
    other = make_site(site.home, RegistryConfig(tracking_uri=f"sqlite:///{elsewhere}"))
    for where, night in ((other, "b-0001"), (other, "b-0002"), (site, "c-0001")):
        content = config.model_dump(mode="json")
        content["registry"] |= {"tracking_uri": where.config.tracking_uri}
        book.folder(night).mkdir(parents=True)
        book.save_config(night, NightConfig.model_validate(content))
        run = NightRun.open(where, night, config)
        run._state.ending, run._state.ending_at = "FINISHED", 1.7e9
        run._save()
    assert finish_late(site).nights == ["b-0001", "b-0002", "c-0001"]
    assert {run.info.status for run in other.registry.client.search_runs(["1"])} == {"FINISHED"}


def test_a_server_that_is_away_is_asked_once_and_told(
    site: Site, config: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def away(*given: object, **named: object) -> None:
        asked.append(given)
        raise ConnectionError("away")

    for night in ("n1", "n2"):
        run = NightRun.open(site, night, config)
        run._state.ending, run._state.ending_at = "FINISHED", 1.7e9
        run._save()
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.MlflowClient.get_run", away)
        told = finish_late(site)
    assert (told.nights, len(told.problems), len(asked)) == ([], 2, 1)
    assert finish_late(site).nights == ["n1", "n2"], "it is tried again"


def test_runs_of_a_dead_night_are_closed_and_others_left_alone(site: Site, config: NightConfig) -> None:
    client = site.registry.client
    dead = NightRun.open(site, "dead", config)
    below = dead.stage_run("ppo")
    foreign = client.create_run(client.get_run(dead.run_id).info.experiment_id).info.run_id
    with run_lease(site.home, "alive"):
        alive = NightRun.open(site, "alive", config)
        done = reconcile(site)
        assert sorted(done.closed_runs) == sorted([dead.run_id, below])
        assert client.get_run(alive.run_id).info.status == "RUNNING"
    assert client.get_run(foreign).info.status == "RUNNING"
    assert client.get_run(below).info.status == "KILLED"
    assert reconcile(site).closed_runs == [alive.run_id]
    assert reconcile(site).nothing_to_do


def test_a_lease_ends_with_its_process(site: Site, config: NightConfig) -> None:
    script = (
        "import sys, os; from pathlib import Path; from tasks.run_lease import run_lease\n"
        "with run_lease(Path(sys.argv[1]), 'n1'):\n    os.kill(os.getpid(), 9)\n"
    )
    night = NightRun.open(site, "n1", config)
    subprocess.run([sys.executable, "-c", script, str(site.home)], check=False)
    lease = read_lease(site.home, "n1")
    assert lease is not None
    assert not lease.alive()
    assert reconcile(site).closed_runs == [night.run_id]
    assert read_lease(site.home, "n1") is None


def test_a_torn_journal_line_is_told_once_and_sealed(site: Site) -> None:
    (site.home / "journal.jsonl").write_bytes(b'{"seq": 1, "ev')
    done = reconcile(site)
    assert "torn last line of a killed writer was sealed" in done.settled[0]
    assert (done.problems, site.journal.torn_lines()) == ([], 1)
    assert reconcile(site).nothing_to_do, "a sealed fragment is nothing that a person has to do"


def test_a_promotion_at_work_is_left_alone(site: Site) -> None:
    with site.locked("promotion of version 7"):
        done = reconcile(site)
    assert "promotion of version 7" in done.busy[0]
    assert (done.problems, done.nothing_to_do) == ([], False), "it is no problem, and the journal was not looked at"

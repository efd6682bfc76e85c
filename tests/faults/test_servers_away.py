"""MLflow and Prefect servers that are killed in the middle of a night, and come back in time, late, or afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows import night_tasks
from tasks.last_config import site_of
from tasks.registry import CHAMPION, ModelRegistry
from tests.faults.meanwhile import meanwhile, once_waiting, until
from tests.faults.night_process import ended, start_night
from tests.faults.servers import Server, mlflow_server, prefect_environment, prefect_server
from tests.faults.soundness import assert_next_night_works, assert_sound
from tests.flows.nights import Nights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STAGES = ("validate", "annotate", "ppo", "evaluate")


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[Server]:
    server = mlflow_server(tmp_path / "mlflow")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def prefect(tmp_path: Path) -> Iterator[Server]:
    server = prefect_server(tmp_path / "prefect-server")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def served(new_home: Callable[..., Nights], mlflow: Server, monkeypatch: pytest.MonkeyPatch) -> Nights:
    """A home on an MLflow server, with a champion. MLflow's own retries are not what is tried out here."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    nights = new_home(registry={"tracking_uri": mlflow.url})
    state = nights.run()
    assert state.is_completed(), state.message
    return nights


def stage_of(nights: Nights, stage: str, index: int = 2) -> Path:
    return nights.home / f"runs/fault-{index:04d}/{stage}"


def each_once_a_night(nights: Nights) -> bool:
    return [nights.starts(stage) for stage in STAGES] == [2, 2, 2, 2]


def test_mlflow_back_while_the_promotion_waits(served, mlflow, monkeypatch) -> None:
    monkeypatch.setenv("NIGHTJAR_FAKE", "ppo=wait")

    def away_until_judged() -> None:
        once_waiting(stage_of(served, "ppo"), mlflow.kill)()
        until((served.home / "runs/fault-0002/gate/decision.json").exists)
        mlflow.start()

    with meanwhile(away_until_judged):
        state = served.run()
    assert state.is_completed(), state.message
    assert "version 2 is champion" in state.message
    monkeypatch.delenv("NIGHTJAR_FAKE")
    assert assert_next_night_works(served) == "3", "what was owed of night 2 is sent at this start"


def test_mlflow_back_after_the_night_has_given_up(served, mlflow, monkeypatch) -> None:
    monkeypatch.setenv("NIGHTJAR_FAKE", "ppo=wait")
    monkeypatch.setattr(night_tasks.register_task, "retry_delay_seconds", [0.1, 0.1, 0.1])
    with meanwhile(once_waiting(stage_of(served, "ppo"), mlflow.kill)):
        state = served.run()
    assert state.is_failed()
    assert "does not answer" in state.message
    assert (served.home / "runs/fault-0002/gate/decision.json").is_file(), "training and the gate went on without it"
    monkeypatch.delenv("NIGHTJAR_FAKE")
    assert served.run().is_failed(), "still away: refused before any compute"

    mlflow.start()
    state = served.run()
    assert state.is_completed(), state.message
    assert each_once_a_night(served)
    assert_sound(served.home)
    assert assert_next_night_works(served) == "3"


def test_mlflow_dies_between_the_alias_and_its_proof(served, mlflow, monkeypatch) -> None:
    move = ModelRegistry.set_alias

    def move_and_lose(self, alias, version):
        move(self, alias, version)
        if alias == CHAMPION:
            mlflow.kill()

    monkeypatch.setattr(night_tasks.promote_task, "retry_delay_seconds", [0.1, 0.1, 0.1])
    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "set_alias", move_and_lose)
        state = served.run()
    assert state.is_failed()

    mlflow.start()
    site = site_of(served.home)
    assert site.registry.alias(CHAMPION) == "2"
    assert [entry.event for entry in site.journal.unfinished()] == ["pending"]
    state = served.run()
    assert state.is_completed(), state.message
    assert [entry.event for entry in site.journal.entries()][-3:] == ["reverted", "pending", "verified"]
    assert each_once_a_night(served)
    assert_sound(served.home)
    assert assert_next_night_works(served) == "3"


@pytest.mark.parametrize("back", ["in time", "afterwards"])
def test_prefect_restarted_in_the_middle_of_a_night(nights, prefect, back: str) -> None:
    assert nights.run().is_completed()
    environment = prefect_environment(prefect.folder, prefect.url) | {"NIGHTJAR_FAKE": "ppo=wait"}
    night = start_night(nights, environment)

    def restart() -> None:
        prefect.kill()
        if back == "in time":
            prefect.start()

    once_waiting(stage_of(nights, "ppo"), restart)()
    status, said = ended(night)
    assert status == 0, said[-3000:]
    if back == "afterwards":
        assert "fault-0002: PASS, version 2 is champion" in said, said[-3000:]
        assert "everything on disk stands" in said, said[-3000:]
    assert site_of(nights.home).registry.alias(CHAMPION) == "2"
    assert each_once_a_night(nights), "results on disk stand"
    assert_sound(nights.home)
    assert assert_next_night_works(nights) == "3"

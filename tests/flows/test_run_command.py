"""What `run` and `watch` refuse is said before Prefect's server is started, and every ending has its exit code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from prefect.states import Completed

from configs.errors import NightjarError
from flows import run_command
from flows.exit_codes import BUSY, DONE
from flows.run_command import run_night, run_watch
from tasks.last_config import site_of
from tasks.measure import ANOTHER_MEASURES
from tasks.night_lock import ANOTHER_RUNS, only_night
from tasks.night_state import NightBook
from tasks.registry import CHAMPION
from tests.stored_nights import run_night as stored_night


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object) -> None:
        raise AssertionError("Prefect is being prepared, so its server would start next")

    monkeypatch.setattr(run_command, "prepare_prefect", started)


def start(config: Path, *overrides: str) -> int:
    return run_night(str(config), overrides, again=False, force=False, why="", plain=True)


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["models.base=/nowhere"], "models.base"),
        (["runtime.min_free_disk_gb=1000000"], "min_free_disk_gb"),
        (["models.base=TINY", "data.quickstart=null", "data.source=/nowhere/pairs.jsonl"], "/nowhere/pairs.jsonl"),
        (["registry.tracking_uri=http://127.0.0.1:9", "registry.reach_timeout_seconds=20"], "not answer"),
    ],
)
def test_a_night_is_refused_before_the_server_starts(nights, tiny_model: Path, overrides, words: str) -> None:
    overrides = [override.replace("TINY", str(tiny_model)) for override in overrides]
    with pytest.raises(NightjarError, match=words) as refused:
        start(nights.config_path, *overrides)
    assert "nothing was computed" in str(refused.value)
    assert NightBook(nights.home).nights() == []


@pytest.mark.usefixtures("no_server", "light_registry")
def test_a_night_is_refused_on_a_journal_that_cannot_be_believed(nights, empty_database: Path, monkeypatch) -> None:
    monkeypatch.setattr("flows.flow_log.FlowLog.note", lambda *told: None)
    assert nights.run().is_completed()
    for damage in (
        lambda: (nights.home / "journal.jsonl").write_text("#\n"),
        lambda: ((nights.home / "journal.jsonl").unlink(), shutil.copy(empty_database, nights.home / "mlflow.db")),
        (nights.home / "mlflow.db").unlink,
    ):
        damage()
        with pytest.raises(NightjarError, match=r"line 1 is not JSON|promoted version 1|missing or empty"):
            start(nights.config_path)
        state = nights.run()
        assert state.is_failed(), "the flow refuses by itself as well"
        assert "nothing was computed" in state.message
    assert not (nights.home / "mlflow.db").exists()
    assert len(NightBook(nights.home).nights()) == 1


@pytest.mark.usefixtures("no_server")
def test_a_second_night_has_an_exit_code_of_its_own(nights, capsys) -> None:
    with only_night(nights.home, "fake"):
        assert start(nights.config_path) == BUSY == 4
    said = capsys.readouterr().err
    assert "another night is running" in said
    assert "wait until it has ended" in said
    assert not (nights.home / "runs").exists()


def test_a_night_that_began_meanwhile_is_busy_and_nothing_to_do_is_not(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_command, "prepare_prefect", lambda home: None)
    busy = [(f"{who}: pid 7", BUSY) for who in (ANOTHER_RUNS, ANOTHER_MEASURES)]
    for message, code in (*busy, ("no new data since night n-0001", DONE)):
        state = Completed(name="Skipped", message=message)
        assert run_command._run(tmp_path, lambda: None, lambda state=state: state, True) == code


@pytest.mark.usefixtures("no_server")
def test_a_watch_is_refused_before_the_server_starts(tmp_path: Path, empty_database: Path, monkeypatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def refused(words: str) -> None:
        with pytest.raises(NightjarError, match=words):
            run_watch(tmp_path, plain=True)

    refused("has seen no night yet")
    folder = stored_night(tmp_path, "chat")
    refused(r"watch\.limits is empty")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"limits": []', '"limits": [{"metric": "reward", "min": 0}]'))
    refused(r"mlflow\.db is missing")
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    refused("has no champion yet")
    (tmp_path / "watch.jsonl").write_text("#\n")
    refused(r"watch\.jsonl: line 1 is not JSON")
    assert site_of(tmp_path).registry.alias(CHAMPION) is None

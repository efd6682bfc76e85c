"""What is refused before a night begins, all of it at once."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from configs.schema import NightConfig
from tasks import preflight
from tasks.model_checks import check_models
from tasks.night_source import check_source
from tasks.preflight import PreflightError, check_before, check_home, check_reward_function
from tests.model_files import write_adapter
from training.errors import ConfigError, DataError, ModelFolderError

BASE = {
    "data": {"source": "d"},
    "models": {"base": "quickstart", "max_prompt_length": 64, "max_response_length": 64},
    "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
}


def config_of(**sections) -> NightConfig:
    content = BASE | {"data": {"quickstart": {}}} | sections
    return NightConfig.model_validate(content)


def models(**named) -> dict:
    return {"base": "quickstart", "max_prompt_length": 64, "max_response_length": 64} | named


def test_a_sound_config_passes(tmp_path: Path) -> None:
    check_before(config_of(), tmp_path / "home")


def test_every_problem_is_told_with_its_way_out(tmp_path: Path) -> None:
    config = config_of(models=models(base=str(tmp_path / "nowhere")), runtime={"min_free_disk_gb": 1e6})

    def no_source() -> None:
        raise DataError("data.source x: no such file", "write another path")

    with pytest.raises(PreflightError) as caught:
        check_before(config, tmp_path / "home", no_source)
    told = str(caught.value)
    assert told.startswith("3 problems")
    assert all(word in told for word in ("models.base", "min_free_disk_gb", "data.source x", "write another path"))


def test_what_a_config_asks_of_a_model_in_vain_begins_no_night(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"(?s)student_layers is 9, and models.base.*nothing was computed"):
        check_before(config_of(models=models(student_layers=9)), tmp_path / "home")


def test_a_source_that_no_night_could_use_begins_none(tmp_path: Path) -> None:
    """With nothing but the check that every night runs."""
    (tmp_path / "rows.jsonl").write_text('{"question": "q"}\n' * 20)
    config = config_of(data={"source": str(tmp_path / "rows.jsonl")}, models=models(base=str(tmp_path)))
    with pytest.raises(DataError, match="none of the known shapes fits the columns found: question"):
        check_source(config)


def test_one_problem_is_told_plainly(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"(?s)min_free_disk_gb.*nothing was computed"):
        check_before(config_of(runtime={"min_free_disk_gb": 1e6}), tmp_path / "home")


def test_teacher_and_student_are_checked_only_where_they_are_used(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ModelFolderError, match=r"models\.student"):
        check_models(config_of(models=models(student=nowhere)))
    check_models(config_of(models=models(student=nowhere), distill={"enabled": False}))
    rule = {"kind": "function", "function": "quickstart"}
    check_models(config_of(models=models(student=nowhere), reward=rule))


def test_adapter_to_continue_from_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"adapter_model\.safetensors"):
        check_models(config_of(distill={"continue_from": str(tmp_path)}))
    write_adapter(tmp_path)
    check_models(config_of(distill={"continue_from": str(tmp_path)}))
    check_models(config_of(distill={"continue_from": "champion"}))


def test_reward_functions_come_from_the_allow_list() -> None:
    with pytest.raises(ConfigError, match="allowed_functions"):
        check_reward_function(config_of(reward={"kind": "function", "function": "os.path:join"}))
    with pytest.raises(ConfigError):
        check_reward_function(config_of(evaluation={"gold_function": "nonsense"}))
    check_reward_function(config_of(evaluation={"gold_function": "quickstart"}))


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match="cannot be written"):
        check_home(tmp_path / "file" / "home", 0.0)

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PreflightError, match="No space left"):
        check_home(tmp_path / "home", 0.0)


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert preflight.free_gigabytes(tmp_path / "a" / "b" / "c") > 0


def test_a_check_that_may_not_read_its_file_is_a_problem_like_others(tmp_path: Path) -> None:
    def unreadable() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/models/base/config.json")

    with pytest.raises(PreflightError, match=r"/models/base/config\.json cannot be read: Permission denied"):
        check_before(config_of(), tmp_path / "home", unreadable)

"""`nightjar validate` finds what a night would refuse, without importing anybody's code."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tiny_model import write_tiny_model

from flows.validate_command import validate_config
from tasks.preflight import PreflightError


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tiny_model(tmp_path / "model")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n' * 20)
    content = {
        "data": {"source": "~/pairs.jsonl"},
        "models": {"base": "~/model", "max_prompt_length": 64, "max_response_length": 64},
        "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
    }
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evaluation.gold_function=nope"], "evaluation.gold_function 'nope' is neither built in (gsm8k, quickstart)"),
        (["reward.kind=function", "reward.function=gsm8"], "reward.function 'gsm8' is neither built in"),
        (["reward.kind=function", "reward.function=gsm8"], "did you mean `gsm8k`?"),
        (["evaluation.gold_function=os.path:join"], "not in reward.allowed_functions"),
    ],
)
def test_a_function_that_a_night_would_refuse(path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(PreflightError) as refused:
        validate_config(path, overrides)
    assert words in str(refused.value)
    assert "what to do" in str(refused.value)


def test_names_that_are_right_and_a_tilde_in_every_path(path: Path, tmp_path: Path) -> None:
    told = validate_config(path, ["evaluation.gold_function=quickstart", "models.student=~/model", "preset=stable"])
    assert f"base {tmp_path / 'model'}" in told
    mine = ["evaluation.gold_function=nowhere.at_all:f", "reward.allowed_functions=['nowhere.at_all:f']"]
    assert "is valid" in validate_config(path, mine), "nothing is imported here: the stages' machine may have more"


def test_what_cannot_be_read_is_told_in_words_and_all_at_once(path: Path, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    with pytest.raises(PreflightError) as refused:
        validate_config(path, [f"models.base={long}", f"data.source={long}"])
    told = str(refused.value)
    assert f"models.base: {long}: cannot be read: File name too long" in told
    assert "data.source" in told
    assert told.count("File name too long") == 2


def test_a_data_file_that_may_not_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused_file(*arguments: object) -> object:
        raise PermissionError(13, "Permission denied", "pairs.jsonl")

    monkeypatch.setattr("training.data.look.read_file", refused_file)
    with pytest.raises(PreflightError, match=r"data\.source .*pairs\.jsonl: cannot be read: Permission denied"):
        validate_config(path, [])

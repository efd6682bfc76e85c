"""What a config asks of its models and they cannot give is refused with both numbers, before any compute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.schema import NightConfig
from tasks.model_checks import check_models
from tests.model_files import write_adapter, write_model_folder
from training.errors import ModelFolderError


@pytest.fixture
def small(tmp_path: Path) -> str:
    return str(write_model_folder(tmp_path / "small"))


@pytest.fixture
def deep(tmp_path: Path) -> str:
    return str(write_model_folder(tmp_path / "deep", num_hidden_layers=30))


def config_of(base: str, models: dict | None = None, **sections) -> NightConfig:
    return NightConfig.model_validate(
        {
            "data": {"quickstart": {}},
            "models": {"base": base, "max_prompt_length": 64, "max_response_length": 64} | (models or {}),
            "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
        }
        | sections
    )


def refusal(config: NightConfig) -> str:
    with pytest.raises((ConfigError, ModelFolderError)) as refused:
        check_models(config)
    assert "what to do" in str(refused.value)
    return str(refused.value)


def test_layers_above_those_of_the_folder_that_is_cut(small: str, deep: str) -> None:
    told = refusal(config_of(small, {"student_layers": 4}))
    assert f"models.student_layers is 4, and models.base ({small}) has 3 decoder layers" in told
    assert "models.teacher_layers is 9, and models.base" in refusal(config_of(small, {"teacher_layers": 9}))
    check_models(config_of(small, {"student_layers": 3, "teacher_layers": 3}))
    check_models(config_of(small, {"teacher": deep, "teacher_layers": 30}))
    check_models(config_of(small, {"student": deep, "student_layers": 30}))
    assert "has 3 decoder layers" in refusal(config_of(deep, {"student": small, "student_layers": 30}))
    assert "models.base (quickstart) has 6" in refusal(config_of("quickstart", {"student_layers": 7}))


def test_layers_of_a_model_that_is_not_used_are_not_looked_at(small: str) -> None:
    rule = {"reward": {"kind": "function", "function": "quickstart"}}
    check_models(config_of(small, {"student_layers": 9, "teacher_layers": 9}, **rule))
    check_models(config_of(small, {"student_layers": 9}, distill={"enabled": False}))


def test_texts_longer_than_the_model_reads(small: str, tmp_path: Path) -> None:
    lengths = {"max_prompt_length": 100, "max_response_length": 29}
    short = str(write_model_folder(tmp_path / "short", max_position_embeddings=128))
    told = refusal(config_of(short, lengths))
    assert "models.max_prompt_length (100) + models.max_response_length (29) = 129 tokens" in told
    assert f"models.base ({short}) reads at most 128" in told
    check_models(config_of(short, lengths | {"max_response_length": 28}))
    assert "models.student" in refusal(config_of(small, lengths | {"student": short}))
    check_models(config_of("quickstart", lengths))


@pytest.mark.parametrize("section", ["sft", "reward", "distill"])
@pytest.mark.parametrize(
    ("targets", "strange"),
    [(["q_proj", "querry"], "'querry'"), (["c_attn"], "'c_attn'"), (".*c_attn", "'.*c_attn'"), ("q_proj", "'q_proj'"),
     ("[", "'['")],
)  # fmt: skip
def test_adapters_on_modules_that_are_not_there(small: str, section: str, targets: object, strange: str) -> None:
    settings = {section: {"lora_rank": 4, "lora_target_modules": targets}}
    told = refusal(config_of(small, **settings))
    assert f"{section}.lora_target_modules: {strange} fits no module of models.base" in told
    assert "q_proj, up_proj" in told
    check_models(config_of(small, **{section: settings[section] | {"lora_rank": 0}}))


def test_adapters_on_modules_that_are_there(small: str) -> None:
    for targets in ("all-linear", ["q_proj"], ["self_attn.q_proj", "up_proj", "lm_head"], r".*\.q_proj"):
        check_models(config_of(small, distill={"lora_target_modules": targets}))
    check_models(config_of("quickstart", distill={"lora_target_modules": ["q_proj", "down_proj"]}))


def test_sft_that_never_runs_refuses_nothing(small: str) -> None:
    """`auto` trains no base that has a chat template already."""
    sft = {"lora_rank": 4, "lora_target_modules": ["c_attn"]}
    assert "sft.lora_target_modules" in refusal(config_of(small, sft=sft))
    (Path(small) / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check_models(config_of(small, sft=sft))
    check_models(config_of(small, sft=sft | {"run": "never"}))
    assert "sft.lora_target_modules" in refusal(config_of(small, sft=sft | {"run": "always"}))


def test_a_path_that_the_system_refuses_is_told_with_its_key(small: str) -> None:
    assert "models.base: /" + "x" * 300 + ": cannot be read: File name too long" in refusal(config_of("/" + "x" * 300))
    assert "models.teacher: /" in refusal(config_of(small, {"teacher": "/" + "x" * 300}))


def test_everything_is_told_at_once(small: str) -> None:
    asked = {"student_layers": 9, "max_prompt_length": 5000, "max_response_length": 100}
    room = {"max_tokens_per_microbatch": 10_200}
    told = refusal(config_of(small, asked | {"teacher": "/nowhere"}, reward=room, distill=room))
    assert all(words in told for words in ("student_layers is 9", "= 5100 tokens", "/nowhere: no such folder"))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "score_head.safetensors", "adapter_config.json"])
def test_an_adapter_to_continue_from_is_whole(small: str, tmp_path: Path, name: str) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    config = config_of(small, distill={"continue_from": str(adapter)})
    check_models(config)
    (adapter / name).write_bytes(b"")
    assert name in refusal(config)
    (adapter / name).unlink()
    assert name in refusal(config)


def test_no_torch_is_needed(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    check_models(config_of(small))

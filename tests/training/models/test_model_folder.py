"""Is a model folder complete and safe? Asked without torch. What loading refuses is in test_backbone_refusals.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_files import WEIGHTS, write_model_folder
from training.errors import ModelFolderError
from training.models.folder import check_model_folder, has_chat_template


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path)


def test_a_whole_folder_says_what_it_is(folder: Path):
    found = check_model_folder(folder)
    assert (found.architecture, found.num_layers, found.hidden_size, found.has_chat_template) == (
        "LlamaForCausalLM", 3, 8, False,
    )  # fmt: skip


def test_shards_that_are_all_there_will_do(folder: Path):
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "part-1.safetensors")}))
    check_model_folder(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [("chat_template.jinja", "x"), ("tokenizer_config.json", json.dumps({"chat_template": "x"}))],
)
def test_a_chat_template_marks_an_instruct_model(folder: Path, file: str, content: str):
    assert not has_chat_template(folder)
    (folder / file).write_text(content)
    assert check_model_folder(folder).has_chat_template


def test_no_template_in_the_settings_is_none(folder: Path):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": None}))
    assert not has_chat_template(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[]"), ("config.json", "{"), ("tokenizer_config.json", "{"),
        ("model.safetensors.index.json", "{"), ("model.safetensors.index.json", "{}"),
        ("model.safetensors.index.json", '{"weight_map": ["a"]}'),
    ],
)  # fmt: skip
def test_a_damaged_json_file_is_named(folder: Path, file: str, content: str):
    (folder / file).write_text(content)
    with pytest.raises(ModelFolderError, match=file):
        check_model_folder(folder)


def test_the_role_is_in_the_message(folder: Path):
    (folder / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"^models.teacher: "):
        check_model_folder(folder, "models.teacher")


def test_asking_needs_no_torch(folder: Path):
    code = (
        "import sys; sys.modules['torch'] = None; from training.models.folder import check_model_folder; "
        f"print(check_model_folder({str(folder)!r}).num_layers)"
    )
    root = Path(__file__).parents[3]
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=root)
    assert found.stdout.strip() == "3", found.stderr

"""The command line: help worth reading, answers in words, exit codes, and nothing heavy where nothing is computed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_model import write_tiny_model
from typer.testing import CliRunner

from configs.errors import ConfigError, NightjarError
from flows.cli import app
from flows.embedded import prepare_prefect
from flows.ui_command import _require_free, ui_command

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "run", "validate", "status", "rollback", "promote", "retention", "reconcile", "generate", "ui", "gate", "watch",
    "doctor", "drill",
)  # fmt: skip


def nightjar(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The installed command, in a process of its own."""
    command = [sys.executable, "-m", "flows.cli", *arguments]
    full = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300", "NO_COLOR": "1"} | environment
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=120, check=False)


def night_yaml(folder: Path, **changes) -> Path:
    write_tiny_model(folder / "model")
    (folder / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n' * 20)
    content = {
        "data": {"source": str(folder / "pairs.jsonl")},
        "models": {"base": str(folder / "model"), "max_prompt_length": 64, "max_response_length": 64},
        "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
        "runtime": {"home": str(folder / "home")},
    } | changes
    path = folder / "my.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_help_names_every_command_and_what_it_does() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert all(command in shown for command in COMMANDS)
    for command in COMMANDS:
        told = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert told.exit_code == 0
        assert len(told.output) > 200, command


def test_validate_says_what_is_right(tmp_path: Path) -> None:
    done = nightjar("validate", str(night_yaml(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert "is valid" in done.stdout
    assert "data: 1 file(s)" in done.stdout
    assert "format `pairs`, columns prompt, chosen, rejected; 20 rows read (all of them), all sound" in done.stdout
    assert not (tmp_path / "home").exists(), "validating writes nothing"


def test_validate_names_the_wrong_key_without_a_traceback(tmp_path: Path) -> None:
    done = nightjar("validate", str(night_yaml(tmp_path, ppo={"clip_ration": 0.2})))
    assert done.returncode == 2
    assert "ppo.clip_ration: unknown key; did you mean `clip_ratio`?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("breaking", "words"),
    [
        (lambda f: (f / "model/tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f / "model/model.safetensors").rename(f / "model/pytorch_model.bin"), "never unpickles"),
        (lambda f: (f / "model/config.json").unlink(), "config.json"),
        (lambda f: (f / "model/model.safetensors").write_bytes(b""), "model.safetensors: empty (0 bytes)"),
        (lambda f: (f / "model/tokenizer.json").write_text("{}"), "holds no tokenizer"),
        (lambda f: (f / "pairs.jsonl").unlink(), "no such file or folder"),
        (lambda f: (f / "pairs.jsonl").write_text(""), "no rows in 1 file(s)"),
        (lambda f: (f / "pairs.jsonl").write_text('{"a": 1}\n' * 20), "none of the known shapes fits the columns"),
    ],
)
def test_validate_finds_what_the_config_names_and_is_not_there(tmp_path: Path, breaking, words: str) -> None:
    path = night_yaml(tmp_path)
    breaking(tmp_path)
    done = nightjar("validate", str(path))
    assert done.returncode == 2
    assert words in done.stderr
    assert "what to do" in done.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("models.student_layers=9", "models.student_layers is 9, and models.base"),
        ("models.max_response_length=900", "= 964 tokens, and models.base"),
        ("distill.lora_target_modules=[c_attn]", "'c_attn' fits no module of models.base"),
    ],
)
def test_validate_refuses_what_only_a_stage_would_have_found_out(tmp_path: Path, override: str, words: str) -> None:
    done = nightjar("validate", str(night_yaml(tmp_path)), override)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_validate_and_run_refuse_a_rule_on_nothing(tmp_path: Path) -> None:
    path = night_yaml(tmp_path)
    for command in (["validate"], ["run", "--plain"]):
        done = nightjar(*command, str(path), "gates.rules=[{metric: rewrad, min: 0}]")
        assert done.returncode == 2, done.stderr
        assert "gates.rules[0].metric: 'rewrad' is no metric of the evaluation report" in done.stderr
        assert "did you mean `reward`" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "home").exists()


def test_validate_loads_no_torch_however_much_it_looks_at(tmp_path: Path) -> None:
    """The whole command on a whole night, with torch blocked; what it has imported is what its two seconds go into."""
    path = night_yaml(tmp_path)
    heavy = ("torch", "transformers", "peft", "mlflow", "prefect", "great_expectations", "pandas", "scipy")
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in heavy)
    code = f"import sys; {blocked}; from flows.cli import main; sys.argv[1:] = ['validate', {str(path)!r}]; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "20 rows read" in done.stdout


@pytest.mark.parametrize("count", ["0", "-3"])
def test_status_of_no_nights_is_refused(tmp_path: Path, count: str) -> None:
    done = nightjar("status", "--home", str(tmp_path), "--nights", count)
    assert done.returncode == 2
    assert "--nights" in done.stderr


def test_run_refuses_before_any_compute(tmp_path: Path) -> None:
    path = night_yaml(tmp_path)
    done = nightjar("run", str(path), "gates.rules=[]")
    assert done.returncode == 2
    assert "no gate rules" in done.stderr
    assert nightjar("run", str(path), "--force").returncode == 2
    assert "needs a reason" in nightjar("run", str(path), "--force").stderr
    assert not (tmp_path / "home").exists()


def test_commands_on_a_home_without_nights_say_so(tmp_path: Path) -> None:
    done = nightjar("rollback", "--why", "x", "--home", str(tmp_path))
    assert done.returncode == 2
    assert "has seen no night yet" in done.stderr
    looked = nightjar("status", "--home", str(tmp_path))
    assert looked.returncode == 0, "nothing is wrong with a home that waits for its first night"
    assert "has seen no night yet" in looked.stdout
    assert nightjar("status", "--home", str(tmp_path / "mistyped")).returncode == 2
    done = nightjar("gate", "explain", "n", "--home", str(tmp_path))
    assert done.returncode == 2
    assert "has no night 'n'" in done.stderr


def test_an_unwritable_home_is_said_in_words(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(NightjarError, match="cannot be made"):
        prepare_prefect(blocked / "home", environment={})


def test_prefect_defaults_keep_what_the_user_has_set(tmp_path: Path) -> None:
    environment = {"PREFECT_API_URL": "http://127.0.0.1:4200/api", "PREFECT_SERVER_ANALYTICS_ENABLED": "true"}
    prepare_prefect(tmp_path, environment=environment)
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"
    assert "PREFECT_HOME" not in environment, "with a server nothing is kept beside it"
    embedded: dict[str, str] = {}
    prepare_prefect(tmp_path, environment=embedded)
    assert embedded["PREFECT_HOME"] == str(tmp_path / "prefect")


def test_ui_listens_on_loopback_only(tmp_path: Path) -> None:
    command = ui_command(tmp_path, "sqlite:///x.db", 5001)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "5001" in command


def test_ui_does_not_take_another_servers_answer_for_its_own() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(NightjarError, match="taken by another program"):
            _require_free(taken.getsockname()[1])


def test_force_without_a_reason_is_refused_in_process() -> None:
    from flows.run_command import run_night

    with pytest.raises(ConfigError, match="reason"):
        run_night("x.yaml", [], again=False, force=True, why=" ", plain=True)


@pytest.mark.usefixtures("light_registry")
def test_status_explain_and_doctor_on_a_judged_night(nights) -> None:
    assert nights.run().is_completed()
    status = nightjar("status", "--home", str(nights.home))
    assert status.returncode == 0, status.stderr
    assert "fake-0001" in status.stdout
    assert "champion version 1" in status.stdout
    explained = nightjar("gate", "explain", "fake-0001", "--home", str(nights.home))
    assert explained.returncode == 0, explained.stderr
    assert "reward" in explained.stdout
    assert "PASS" in explained.stdout
    _tamper_with_the_report(nights.home)
    differing = nightjar("gate", "explain", "fake-0001", "--home", str(nights.home))
    assert differing.returncode == 2
    assert "do not trust either" in differing.stderr
    doctor = nightjar("doctor", str(nights.config_path), MLFLOW_TRACKING_URI="")
    assert doctor.returncode == 0, doctor.stdout
    assert "torch" in doctor.stdout


def _tamper_with_the_report(home: Path) -> None:
    file = home / "runs/fake-0001/evaluate/report.json"
    report = json.loads(file.read_text())
    report["night"] = "another"
    file.write_text(json.dumps(report))


@pytest.mark.parametrize("command", [["rollback"], ["promote", "1", "--force"], ["reconcile", "--adopt"]])
def test_a_reason_that_is_no_text_is_refused_in_words(command: list[str], tmp_path: Path) -> None:
    told = CliRunner().invoke(app, [*command, "--home", str(tmp_path), "--why", os.fsdecode(b"bad\xff")])
    assert told.exit_code == 2
    assert "is no text in UTF-8" in told.output

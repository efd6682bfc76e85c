"""Secrets in the environment leave no trace: not in logs, stage specs, configs, MLflow or Prefect's own database."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
FAKES = Path(__file__).resolve().parent / "fakes"
PLANTED = {
    "MLFLOW_TRACKING_PASSWORD": "pl4nted-mlflow-password",
    "MLFLOW_TRACKING_TOKEN": "pl4nted-mlflow-token",
    "AWS_SECRET_ACCESS_KEY": "pl4nted-object-store-key",
    "PREFECT_API_AUTH_STRING": "nightjar:pl4nted-prefect-words",
    "SLACK_WEBHOOK": "pl4nted-webhook",
}


def holding(home: Path, words: str) -> list[str]:
    """Files under `home` that contain the words, databases and logs included."""
    wanted = words.encode()
    files = [file for file in home.rglob("*") if file.is_file()]
    return [str(file.relative_to(home)) for file in files if wanted in file.read_bytes()]


def test_a_night_writes_no_secret_anywhere(nights, light_registry, tiny_model) -> None:
    # No server is named: the night brings its own, so that what Prefect stores lies in the home as well.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    path = os.pathsep.join([str(ROOT), str(FAKES)])
    environment |= PLANTED | {"PYTHONPATH": path, "NIGHTJAR_FAKE_MODEL": str(tiny_model), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FAKES / "fake_cli.py"), "run", str(nights.config_path), "--plain"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list((nights.home / "prefect").glob("prefect.db")), "Prefect's database was looked into as well"
    for name, words in PLANTED.items():
        secret = words.rpartition(":")[2]
        assert holding(nights.home, secret) == [], name
        assert secret not in done.stdout + done.stderr, name
    assert_logs_hold_no_answers(nights.home, done.stdout + done.stderr)


def assert_logs_hold_no_answers(home: Path, said: str) -> None:
    """People's words are in reports that show them, never in what a program says on its way."""
    (rows, *_) = sorted(home.glob("quickstart/*/*/pairs.parquet"))
    texts = set(pq.read_table(rows).column("chosen").to_pylist()[:40])
    assert texts
    logs = [file for file in home.rglob("*") if file.name in ("log.txt", "metrics.jsonl", "prefect.db")]
    assert logs
    written = b"\n".join(file.read_bytes() for file in logs) + said.encode()
    assert [text for text in texts if text.encode() in written] == []


def test_a_written_secret_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/log.txt").write_text(f"password={PLANTED['MLFLOW_TRACKING_PASSWORD']}\n")
    assert holding(tmp_path, PLANTED["MLFLOW_TRACKING_PASSWORD"]) == ["runs/log.txt"]


def test_stages_get_no_credentials_of_servers() -> None:
    from tasks.launch_plan import LaunchPlan

    for stage, kept in (("ppo", {"SLACK_WEBHOOK"}), ("validate", {"SLACK_WEBHOOK", "AWS_SECRET_ACCESS_KEY"})):
        given = LaunchPlan().environment(stage, os.environ | PLANTED)
        assert {name for name in PLANTED if name in given} == kept, stage

"""A full disk is said in words with code 2. The limit on file sizes stands for the disk: the system refuses alike."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tests.training.forks import run_forked
from training.__main__ import main
from training.contract import StageSpec, write_spec
from training.disk import full_disk_in_words, is_disk_full
from training.errors import DiskFullError, StageError

ROOT = Path(__file__).resolve().parents[2]
BYTES = 4096


def limited() -> None:
    """Files of this process may have BYTES and no more; Python ignores the signal that comes with it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, BYTES))


def test_a_real_stage_ends_with_code_2_and_words(tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    rows = ({"prompt": f"question {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(400))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    directory = tmp_path / "home/runs/n1/validate"
    data = {"source": str(source), "near_duplicate_threshold": None}
    write_spec(directory, StageSpec("validate", "n1", str(tmp_path / "home"), 0, {"data": data}))
    command = [sys.executable, "-m", "tasks", "validate", str(directory)]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=limited, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ERROR nightjar: DiskFullError: " in done.stdout
    assert "could not be written" in done.stdout
    assert f"free space (or raise the quota) on the disk of {directory}; repeating the command goes on" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_training_says_it_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(directory: Path, function: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(directory / "view.json"))

    monkeypatch.setattr("training.__main__.die_with_parent", lambda: None)
    monkeypatch.setattr("training.__main__.run_stage", full)
    assert main(["base", str(tmp_path)]) == 2
    assert f"{tmp_path / 'view.json'} could not be written: No space left on device" in caplog.text


def test_libraries_with_errors_of_their_own_are_understood(tmp_path: Path) -> None:
    import numpy as np

    def save() -> None:
        limited()
        with pytest.raises(DiskFullError, match="could not be written"), full_disk_in_words(tmp_path):
            save_file({"weights": np.zeros(BYTES)}, tmp_path / "weights.safetensors")

    assert run_forked(save) == 0
    assert is_disk_full(RuntimeError("(sqlite3.OperationalError) database or disk is full"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_the_system_s_refusals(number: int, tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match=str(tmp_path)), full_disk_in_words(tmp_path):
        raise OSError(number, "refused")


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), ValueError("x"), StageError("disk: no space")])
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, full_disk_in_words(tmp_path):
        raise error
    assert caught.value is error

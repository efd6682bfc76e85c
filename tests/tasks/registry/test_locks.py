"""Locks end with their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.locks import held_lock, model_lock_path
from tasks.registry_errors import LockHeld, LockUnusable

HOLDER = """
import sys, time
from pathlib import Path
from tasks.locks import held_lock
with held_lock(Path(sys.argv[1]), "the other one"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_same_process_cannot_take_it_twice(tmp_path: Path) -> None:
    with held_lock(tmp_path / "lock", "first"), pytest.raises(LockHeld, match=rf"first \(pid {os.getpid()}"), held_lock(
        tmp_path / "lock", "second"
    ):
        pass
    with held_lock(tmp_path / "lock", "third"):
        pass


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(LockHeld, match="the other one"), held_lock(file, "mine"):
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    with held_lock(file, "mine", wait_seconds=5):
        pass


def test_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    script = HOLDER.replace("time.sleep(60)", "time.sleep(0.5)")
    child = subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    with held_lock(file, "mine", wait_seconds=30):
        pass
    child.wait()


def test_lock_names_are_file_names(tmp_path: Path) -> None:
    assert model_lock_path(tmp_path, "a b/../c").parent == tmp_path / "locks"


def test_a_lock_that_cannot_be_made_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    file = tmp_path / "home" / "night.lock"
    with pytest.raises(LockUnusable, match=f"a night cannot start: {file}") as caught, held_lock(file, "a night"):
        pass
    assert "NIGHTJAR_HOME" in (caught.value.hint or "")

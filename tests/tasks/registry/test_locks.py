"""Locks end with their process."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks import locks
from tasks.locks import held_lock, holder_of, model_lock_path, night_lock_path
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


@contextmanager
def somebody_looks(file: Path) -> Iterator[int]:
    """Another open file of this process stands in the middle of a look; yields its descriptor."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_look_names_the_holder_and_makes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "home" / "lock"
    assert holder_of(file) is None
    assert not file.parent.exists()
    with held_lock(file, "a night"):
        assert holder_of(file) == f"a night (pid {os.getpid()} on {os.uname().nodename})"
    assert holder_of(file) is None


def test_who_only_looks_is_waited_for_even_by_those_who_wait_for_nobody(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with somebody_looks(file) as descriptor:
        assert holder_of(file) is None, "one who looks does not see another who looks"
        threading.Timer(0.3, fcntl.flock, (descriptor, fcntl.LOCK_UN)).start()
        with held_lock(file, "a night"):
            assert holder_of(file) is not None


def test_a_look_that_never_ends_is_waited_for_with_a_bound(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(locks, "_LOOK_SECONDS", 0.3)
    file = tmp_path / "lock"
    with somebody_looks(file), pytest.raises(LockHeld), held_lock(file, "a night"):
        pass


def test_lock_names_are_file_names(tmp_path: Path) -> None:
    assert model_lock_path(tmp_path, "a b/../c").parent == tmp_path / "locks"


def test_a_lock_that_cannot_be_made_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    file = tmp_path / "home" / "night.lock"
    with pytest.raises(LockUnusable, match=f"a night cannot start: {file}") as caught, held_lock(file, "a night"):
        pass
    assert "NIGHTJAR_HOME" in (caught.value.hint or "")


def test_names_that_look_alike_lock_each_other_out_no_more(tmp_path: Path) -> None:
    names = ("a_b", "a.b", "a b", "a-b")
    assert len({night_lock_path(tmp_path, name) for name in names}) == len(names)
    assert model_lock_path(tmp_path, "nightjar-policy").name == "nightjar-policy.lock"

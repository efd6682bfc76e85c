"""Locks end with their process; a reused pid is not the old process."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tasks.locks import ProcessIdentity, held_lock, model_lock_path
from tasks.registry_errors import LockHeld

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


def test_process_identity_sees_through_reused_pids_boots_and_hosts() -> None:
    me = ProcessIdentity.current()
    assert me.alive() is True
    assert dataclasses.replace(me, started=me.started - 100).alive() is False
    assert dataclasses.replace(me, boot_id="another").alive() is False
    assert dataclasses.replace(me, host="another").alive() is None


def test_a_dead_and_a_zombie_process_are_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    identity = dataclasses.replace(ProcessIdentity.current(), pid=child.pid, started=process.create_time())
    assert identity.alive() is True
    child.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        pass
    assert identity.alive() is False
    child.wait()
    assert identity.alive() is False

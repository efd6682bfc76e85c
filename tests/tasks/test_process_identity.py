"""A reused pid is not the old process, and a process stays itself when the clock is set."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tasks import process_identity
from tasks.process_identity import ProcessIdentity


def test_process_identity_sees_through_reused_pids_boots_and_hosts() -> None:
    me = ProcessIdentity.current()
    assert me.alive() is True
    assert dataclasses.replace(me, started=me.started - 100).alive() is False
    assert dataclasses.replace(me, boot_id="another").alive() is False
    assert dataclasses.replace(me, host="another").alive() is None


def test_a_dead_and_a_zombie_process_are_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    identity = ProcessIdentity.of(child.pid)
    assert identity.alive() is True
    child.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        pass
    assert identity.alive() is False
    child.wait()
    assert identity.alive() is False
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(child.pid)


def test_setting_the_clock_changes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    me = ProcessIdentity.current()
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: before(self) + 3600.0)
    assert me.alive() is True
    assert ProcessIdentity.current() == me


def test_a_program_s_name_may_hold_brackets_and_spaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    me = ProcessIdentity.current()
    real = Path(f"/proc/{os.getpid()}/stat").read_text()
    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    (folder / "stat").write_text(real.replace(real[real.index("(") : real.rindex(")") + 1], "(a) Z 1 (b c)"))
    monkeypatch.setattr(process_identity, "_PROC", tmp_path)
    assert me.alive() is True


def test_without_proc_seconds_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_identity, "_BOOT_ID", tmp_path / "none")
    me = ProcessIdentity.current()
    assert me.started == pytest.approx(psutil.Process().create_time())
    assert me.alive() is True
    assert dataclasses.replace(me, started=me.started - 100).alive() is False

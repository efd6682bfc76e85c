"""Nights of several chains on one home: each has its turn, and none is lost without a word."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tasks.night_lock import NightAtWork, check_alone, night_at_work, only_night
from tasks.registry_errors import LockHeld

ROOT = Path(__file__).resolve().parents[2]


def test_another_chain_s_night_is_waited_for_and_that_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    first = ExitStack()
    first.enter_context(only_night(tmp_path, "chat"))
    threading.Timer(0.5, first.close).start()
    with only_night(tmp_path, "code", wait_seconds=60.0, tell=told.append):
        holder = night_at_work(tmp_path)
        assert holder is not None
        assert holder.startswith("a night of code (pid ")
    assert len(told) == 1
    assert "a night of chat (pid " in told[0]
    assert night_at_work(tmp_path) is None


def test_nobody_waits_without_end_nor_goes_green(tmp_path: Path) -> None:
    with (
        only_night(tmp_path, "chat"),
        pytest.raises(LockHeld, match=r"a night of code waited 0.005 minutes .* a night of chat") as caught,
        only_night(tmp_path, "code", wait_seconds=0.3),
    ):
        pass
    assert not isinstance(caught.value, NightAtWork)
    assert "runtime.turn_wait_minutes" in (caught.value.hint or "")
    with only_night(tmp_path, "code"):
        pass


def test_the_same_chain_is_at_work_also_while_it_waits(tmp_path: Path) -> None:
    waits, over = threading.Event(), threading.Event()

    def second_chain() -> None:
        with only_night(tmp_path, "code", wait_seconds=60.0, tell=lambda text: waits.set()):
            over.set()

    with only_night(tmp_path, "chat"):
        thread = threading.Thread(target=second_chain)
        thread.start()
        assert waits.wait(60.0)
        for chain in ("chat", "code"):
            with pytest.raises(NightAtWork), only_night(tmp_path, chain, wait_seconds=60.0):
                pass
            with pytest.raises(NightAtWork):
                check_alone(tmp_path, chain)
        check_alone(tmp_path, "prose")
        assert not over.is_set()
    thread.join()
    assert over.is_set()
    check_alone(tmp_path, "code")


def test_second_process_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(LockHeld, match=f"pid {holder.pid}"), only_night(tmp_path, "chat"):
        pass
    holder.kill()
    holder.wait()
    with only_night(tmp_path, "chat"):
        pass


def test_who_looks_whether_a_night_is_at_work_makes_no_night_skip(tmp_path: Path) -> None:
    with only_night(tmp_path, "chat"):
        pass
    lookers = [subprocess.Popen([sys.executable, "-c", _LOOKER, str(tmp_path)], cwd=ROOT) for _ in range(2)]
    began = 0
    while any(looker.poll() is None for looker in lookers):
        with only_night(tmp_path, "chat"):
            began += 1
    assert began > 0
    assert [looker.returncode for looker in lookers] == [0, 0]


_LOOKER = """
import sys
sys.path.insert(0, "")
from contextlib import suppress
from pathlib import Path
from tasks.night_lock import check_alone
from tasks.registry_errors import LockHeld
for _ in range(300):
    with suppress(LockHeld):
        check_alone(Path(sys.argv[1]), "chat")
"""
_HOLDER = """
import sys
sys.path.insert(0, "")
from pathlib import Path
from tasks.night_lock import only_night
with only_night(Path(sys.argv[1]), "chat"):
    print("held", flush=True)
    sys.stdin.read()
"""

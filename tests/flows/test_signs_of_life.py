"""A handed-over run ends by itself when its night is gone, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from flows.signs_of_life import Handover, Pulse, ending_with_the_night
from tasks.lease import renewed_lease
from training.contract import LEASE

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, time
from pathlib import Path
from flows.signs_of_life import Handover, ending_with_the_night
with ending_with_the_night(Handover(Path(sys.argv[1])), float(sys.argv[2])):
    print("at work", flush=True)
    time.sleep(float(sys.argv[3]))
print("done", flush=True)
"""


def start_run(handover: Handover, lease: float, works: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, str(handover.folder), str(lease), str(works)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    return process


def test_a_run_whose_night_is_gone_is_ended(tmp_path: Path) -> None:
    process = start_run(Handover(tmp_path / "handover"), lease=0.4, works=60)
    assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_run_whose_night_lives_is_left_alone_and_ended_after_it(tmp_path: Path) -> None:
    handover = Handover(tmp_path / "handover")
    handover.prepare()
    with renewed_lease(handover.night, 0.8):
        process = start_run(handover, lease=0.8, works=60)
        time.sleep(2.4)
        assert process.poll() is None
    assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_run_by_hand_watches_nothing(tmp_path: Path) -> None:
    with ending_with_the_night(None, 0.01):
        time.sleep(0.2)


def test_the_run_shows_life_while_it_works(tmp_path: Path) -> None:
    handover = Handover(tmp_path / "handover")
    pulse = Pulse(handover.run)
    with renewed_lease(_made(handover).night, 0.4), ending_with_the_night(handover, 0.4):
        beats = 0
        for _ in range(6):
            time.sleep(0.15)
            beats += pulse.silent_for() < 0.14
    assert beats > 0
    assert not any(thread.name == "night-pulse" for thread in threading.enumerate())
    assert not (handover.run / LEASE).exists()


def test_only_changes_count_whatever_time_they_carry(tmp_path: Path) -> None:
    """The other machine's clock may be a year off."""
    (tmp_path / LEASE).touch()
    os.utime(tmp_path / LEASE, (10**9, 10**9))
    pulse = Pulse(tmp_path)
    time.sleep(0.3)
    assert pulse.silent_for() >= 0.3
    os.utime(tmp_path / LEASE, (10**9 - 50, 10**9 - 50))
    assert pulse.silent_for() < 0.2
    (tmp_path / LEASE).unlink()
    time.sleep(0.2)
    assert pulse.silent_for() >= 0.2, "a file that vanishes is no sign of life"


def _made(handover: Handover) -> Handover:
    handover.prepare()
    return handover

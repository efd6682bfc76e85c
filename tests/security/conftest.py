"""Servers as an operations team would start them: on loopback, asking who is there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tasks.launch_plan import free_port

Started = Callable[[list[str], Mapping[str, str], str], None]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    """Start `python -m ...` with the settings and wait until the URL answers, whatever it answers."""
    started: list[subprocess.Popen[bytes]] = []

    def starting(command: list[str], settings: Mapping[str, str], url: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        log = (tmp_path / f"server-{len(started)}.log").open("wb")
        run = [sys.executable, "-m", *command]
        started.append(subprocess.Popen(run, env=clean | dict(settings), stdout=log, stderr=log, cwd=tmp_path))
        deadline = time.monotonic() + 240
        while not _answers(url):
            assert started[-1].poll() is None, Path(log.name).read_text()[-3000:]
            assert time.monotonic() < deadline, Path(log.name).read_text()[-3000:]
            time.sleep(0.3)

    yield starting
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True

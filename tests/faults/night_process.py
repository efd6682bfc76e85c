"""Nights in processes of their own, which can be killed: the command line on small stages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from prefect.settings import PREFECT_API_URL

from tests.faults.servers import plain_environment
from tests.flows.nights import FAKES as SMALL_STAGES

FAKES = Path(__file__).resolve().parent / "fakes"
ENDS_SECONDS = 900


def start_night(nights, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`nightjar run` of these nights' config; by default on the session's Prefect server."""
    command = [sys.executable, str(FAKES / "fault_cli.py"), "run", str(nights.config_path), "--plain"]
    path = os.pathsep.join([plain_environment()["PYTHONPATH"], str(SMALL_STAGES)])
    given = plain_environment() | {"PREFECT_API_URL": str(PREFECT_API_URL.value())} | (environment or {})
    return subprocess.Popen(
        command, env=given | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and everything said."""
    said, _ = process.communicate(timeout=ENDS_SECONDS)
    return process.returncode, said

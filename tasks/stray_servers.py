"""Prefect's temporary server outlives a night that was killed: the next one ends it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, MutableMapping

import psutil

from tasks.process_identity import ProcessIdentity

OWNER = "NIGHTJAR_SERVER_OWNER"
_SERVER = "prefect.server"
_GRACE_SECONDS = 10.0


def sign(environment: MutableMapping[str, str]) -> None:
    """Leave this process's name in `environment`, so that the server it starts can be told from another's."""
    me = ProcessIdentity.current()
    environment[OWNER] = f"{me.boot_id}:{me.pid}:{me.started}"


def end_strays(prefect_home: str) -> int:
    """End the temporary servers on `prefect_home` whose night is gone. Returns how many there were."""
    strays = [one for one in psutil.process_iter() if _is_stray(one, prefect_home)]
    for stray in strays:
        _quietly(stray.terminate)
    _, left = psutil.wait_procs(strays, timeout=_GRACE_SECONDS)
    for stray in left:
        _quietly(stray.kill)
    psutil.wait_procs(left, timeout=_GRACE_SECONDS)
    return len(strays)


def _is_stray(process: psutil.Process, prefect_home: str) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        environment = process.environ()
        owner = environment.get(OWNER)
        if not owner or environment.get("PREFECT_HOME") != prefect_home:
            return False
        return any(_SERVER in word for word in process.cmdline()) and not _lives(owner)
    except (psutil.Error, OSError):
        return False


def _lives(owner: str) -> bool:
    try:
        boot, pid, started = owner.split(":")
        return ProcessIdentity(socket.gethostname(), boot, int(pid), float(started)).alive() is True
    except (psutil.Error, OSError, ValueError):
        return False


def _quietly(act: Callable[[], None]) -> None:
    try:
        act()
    except psutil.Error:
        return

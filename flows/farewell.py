"""The end of a command: Prefect's last events are waited for, but not for ever.

Prefect sends them at exit one after the other, and tries each eleven times in eight seconds. A server that went away
during a night kept the finished process for minutes.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

SECONDS = 30.0
_WORDS = "Prefect's server does not answer: its pages will lack the end of this run; everything on disk stands\n"


def leave(ending: SystemExit, seconds: float = SECONDS) -> NoReturn:
    """End this process as `ending` says, without what nobody has taken after `seconds`."""
    if _told_everything(seconds):
        raise ending
    sys.stdout.flush()
    sys.stderr.write(_WORDS)
    sys.stderr.flush()
    os._exit(ending.code if isinstance(ending.code, int) else int(ending.code is not None))


def _told_everything(seconds: float) -> bool:
    if "prefect.events.worker" not in sys.modules:  # nothing was said to any server
        return True
    from prefect.events.worker import EventsWorker

    outcome = EventsWorker.drain_all(timeout=seconds)
    return not (isinstance(outcome, tuple) and outcome[1])

"""What a stage needs to go on, and nobody needs once a later night has begun: weights with their moments, many times.

A night goes on from its checkpoints as long as it is the newest of its chain. Without this, nights of a 7B model would
fill a disk within a week.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from training.contract import CHECKPOINTS, GOOD_STATES

_ASIDE = ".spent.tmp"


def drop_spent_states(nights: Iterable[Path]) -> None:
    """Remove the checkpoints and good states below these nights' folders; results, reports and curves stay.

    Renamed first, so that a kill half-way leaves no torn checkpoint; the next call clears what is left. A disk that
    refuses is no reason for a night to fail.
    """
    for night in nights:
        for name in (CHECKPOINTS, GOOD_STATES):
            for folder in night.glob(f"*/{name}"):
                aside = folder.with_name(f".{name}{_ASIDE}")
                shutil.rmtree(aside, ignore_errors=True)
                with suppress(OSError):
                    folder.rename(aside)
        for aside in night.glob(f"*/.*{_ASIDE}"):
            shutil.rmtree(aside, ignore_errors=True)

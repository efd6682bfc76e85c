"""What nights leave behind on disk, as far as commands look at it later: written without running any."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from configs.schema import NightConfig
from tasks.night_state import NightBook, NightState

BASE = {
    "data": {"source": "pairs.jsonl"},
    "models": {"base": "base"},
    "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
}


def run_night(home: Path, name: str, index: int = 1, when: float = 0.0, **registry: object) -> Path:
    """What a night of this chain leaves behind, as far as commands look at it."""
    book = NightBook(home)
    registry = {"model": f"{name}-policy"} | registry
    config = NightConfig.model_validate(BASE | {"name": name, "registry": registry})
    night = f"{name}-{index:04d}"
    book.save(
        NightState(
            night=night, index=index, name=name, config_hash="h", fingerprint="f", started=when, status="finished"
        )
    )
    book.save_config(night, config)
    os.utime(book.folder(night) / "config.json", (when, when))
    return book.folder(night)


def keep_undecided(home: Path, night: str, index: int, version: str, **more: Any) -> NightState:
    """A night whose gate could not decide, and whose version waits for a person."""
    state = NightState(
        night=night, index=index, name=night.rpartition("-")[0], config_hash="c", fingerprint="f", started=1.0,
        status="finished", verdict="INCONCLUSIVE", version=version, **more,
    )  # fmt: skip
    NightBook(home).save(state)
    return state

"""What nights leave behind on disk, as far as commands look at it later: written without running any."""

from __future__ import annotations

import os
from pathlib import Path

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

"""Tags that tie MLflow runs to a home and a night."""

from __future__ import annotations

import uuid
from pathlib import Path

HOME = "nightjar.home"
NIGHT_NAME = "nightjar.night"
STAGE = "nightjar.stage"
CONFIG_HASH = "nightjar.config_hash"
PARENT = "mlflow.parentRunId"
NOTE = "mlflow.note.content"

_FILE = "home_id"


def home_id(home: Path) -> str:
    """A name for this home that does not tell where it lies; made once and kept in the home."""
    file = home / _FILE
    if not file.is_file():
        home.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f".{_FILE}.{uuid.uuid4().hex}")
        fresh.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            file.hardlink_to(fresh)  # whoever is first wins; a second process reads the same name
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return file.read_text(encoding="utf-8")

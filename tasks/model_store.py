"""Models that later nights need, kept by content in `<home>/models/<sha256>/`: references and reward models."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from training.contract import FileRef, file_ref, fsync_folder

FOLDER = "models"


def keep_model(home: Path, model: FileRef) -> FileRef:
    """Keep a folder under its sha256 (hard links where the file system has them) and return its lasting place."""
    place = home / FOLDER / model.sha256
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        writing = Path(tempfile.mkdtemp(prefix=".writing-", dir=place.parent))
        shutil.copytree(model.path, writing, dirs_exist_ok=True, copy_function=_link_or_copy)
        try:
            writing.rename(place)
        except OSError:  # another process kept the same content meanwhile
            shutil.rmtree(writing)
            if not place.is_dir():
                raise
        fsync_folder(place.parent)
    return FileRef(str(place), model.sha256, model.size)


def find_model(home: Path, sha256: str | None) -> FileRef | None:
    """The kept folder with that content; None when it is not there or no longer what it was."""
    if sha256 is None:
        return None
    place = home / FOLDER / sha256
    if not place.is_dir():
        return None
    found = file_ref(place)
    return found if found.sha256 == sha256 else None


def _link_or_copy(source: str, destination: str) -> str:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
    return destination

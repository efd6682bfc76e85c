"""Finished stages by key, so that a later night with the same key computes nothing twice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.contract import StageResult, read_json, valid_result, write_json
from training.errors import ContractError

FOLDER = "stages"


@dataclass(frozen=True)
class FoundResult:
    """A valid manifest and the directory it was found in."""

    result: StageResult
    directory: Path


def find_result(home: Path, directory: Path, key: str) -> FoundResult | None:
    """The valid result of `key`, in `directory` or wherever an earlier night left it; every hash is checked."""
    result = valid_result(directory, key)
    if result is not None:
        return FoundResult(result, directory)
    earlier = _directory_of(home, key)
    if earlier is None or earlier == directory:
        return None
    result = valid_result(earlier, key)
    return None if result is None else FoundResult(result, earlier)


def remember_result(home: Path, directory: Path, result: StageResult) -> None:
    """Note where the result of this key lies, relative to the home, which may be moved as a whole."""
    entry = _entry(home, result.key)
    entry.parent.mkdir(parents=True, exist_ok=True)
    place = directory.resolve()
    inside = place.is_relative_to(home.resolve())
    shown = place.relative_to(home.resolve()) if inside else place
    write_json(entry, {"stage": result.stage, "directory": shown.as_posix()})


def _entry(home: Path, key: str) -> Path:
    return home / FOLDER / f"{key}.json"


def _directory_of(home: Path, key: str) -> Path | None:
    try:
        content = read_json(_entry(home, key))
        return home / str(content["directory"])
    except (ContractError, KeyError, TypeError):
        return None

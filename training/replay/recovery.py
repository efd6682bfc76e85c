"""Reading a store that others write, and putting in order what a crash or a bad disk left."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from training.contract import fsync_folder
from training.errors import StoreError
from training.replay.index import StoreIndex, build_index
from training.replay.manifest import ManifestState, load_manifests, manifest_files, manifest_path, write_manifest
from training.replay.segment import Segment, SegmentEntry, open_segment

READ_ATTEMPTS = 20
"""How often a reader looks again when a writer removed files between its look at the manifest and its opening them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RepairReport:
    """What a repair set aside: segment files by name, and the rows that went with them."""

    segments: tuple[str, ...]
    lost_trajectories: int
    lost_annotations: int


def segments_folder(path: Path) -> Path:
    """Folder of the segment files."""
    return path / "segments"


def read_store(
    path: Path, *, opened: dict[str, Segment] | None = None, verify: bool = True
) -> tuple[ManifestState, StoreIndex]:
    """The newest generation, opened, while a writer may be at work. Raises StoreError naming a damaged segment."""
    known = dict(opened or {})
    generation = -1
    for _ in range(READ_ATTEMPTS):
        state = load_manifests(path)
        try:
            return state, build_index(segments_folder(path), state.newest, known, verify=verify)
        except FileNotFoundError as error:
            if state.newest.generation == generation:
                raise _missing(path, error) from None
            generation = state.newest.generation
    raise StoreError(f"trajectory store {path}: it changed {READ_ATTEMPTS} times while being read", "try again")


def describe_fallback(path: Path, state: ManifestState) -> str | None:
    """A sentence about damaged manifests that were passed over, also logged; None where there are none."""
    if not state.refused:
        return None
    reasons = "; ".join(reason for _, reason in state.refused)
    message = f"trajectory store {path}: fell back to generation {state.newest.generation} ({reasons})"
    logger.warning("%s", message)
    return message


def clean(path: Path, state: ManifestState) -> None:
    """Remove what no manifest needs: torn files of a crash. For the writer alone.

    After a fallback those files may be the lost generation's, so they move into `quarantine/` instead; the damaged
    manifests go last, so that an interruption here is told from a healthy store.
    """
    needed = state.segment_names()
    strays = [file for file in segments_folder(path).iterdir() if file.name not in needed and not _temporary(file)]
    if state.refused:
        _set_aside(path, [*strays, *(file for file, _ in state.refused)])
    else:
        for file in strays:
            file.unlink()
    for folder in (path, segments_folder(path)):
        for file in folder.iterdir():
            if _temporary(file):
                file.unlink()


def prune(path: Path) -> None:
    """Forget generations before the last two, and segments that only they needed. For the writer alone."""
    state = load_manifests(path)
    kept = {manifest_path(path, manifest.generation) for manifest in (state.newest, *state.older[:1])}
    for file in manifest_files(path):
        if file not in kept:
            file.unlink()
    needed = {entry.name for manifest in (state.newest, *state.older[:1]) for entry in manifest.segments}
    for file in segments_folder(path).iterdir():
        if file.name not in needed:
            file.unlink()


def repair(path: Path) -> RepairReport:
    """Commit a generation without damaged or missing segments, which move into `quarantine/`. For the writer alone."""
    state = load_manifests(path)
    good: list[SegmentEntry] = []
    bad: list[SegmentEntry] = []
    for entry in state.newest.segments:
        try:
            open_segment(segments_folder(path), entry)
            good.append(entry)
        except (StoreError, FileNotFoundError):
            bad.append(entry)
    files = [segments_folder(path) / entry.name for entry in bad]
    _set_aside(path, [file for file in files if file.exists()])
    if bad:
        write_manifest(path, state.newest.next(segments=tuple(good)))
    return RepairReport(
        segments=tuple(entry.name for entry in bad),
        lost_trajectories=sum(entry.rows for entry in bad if entry.annotation is None),
        lost_annotations=sum(entry.rows for entry in bad if entry.annotation is not None),
    )


def _set_aside(path: Path, files: list[Path]) -> None:
    if not files:
        return
    quarantine = path / "quarantine"
    quarantine.mkdir(exist_ok=True)
    for file in files:
        target, copy = quarantine / file.name, 0
        while target.exists():
            copy += 1
            target = quarantine / f"{file.name}.{copy}"
        os.replace(file, target)
        fsync_folder(quarantine)


def _temporary(file: Path) -> bool:
    return file.name.startswith(".") and file.name.endswith(".tmp")


def _missing(path: Path, error: FileNotFoundError) -> StoreError:
    name = Path(str(error.filename)).name
    return StoreError(
        f"trajectory store segment {name} in {segments_folder(path)} is missing",
        "restore that file from a copy, or call TrajectoryStore.repair(path) to go on without its rows",
    )

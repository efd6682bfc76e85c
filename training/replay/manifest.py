"""The manifest: which segments make up the store. Numbered files; the highest valid number is the truth."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from training.contract import write_json
from training.errors import StoreError
from training.replay.annotation import AnnotationKey
from training.replay.segment import SegmentEntry

FORMAT = 1
LOOKS = 10
_NAME = re.compile(r"manifest-(\d{8})\.json")


@dataclass(frozen=True)
class Manifest:
    """One committed state of the store.

    `segments` in row order. `nights`: every night that wrote, oldest first; a row's created_night is a place in this
    list. `tokenizer_digest`: the tokenizer whose ids the rows are, None while unsaid.
    """

    generation: int = 0
    segments: tuple[SegmentEntry, ...] = ()
    nights: tuple[str, ...] = ()
    tokenizer_digest: str | None = None

    def next(self, **changes: Any) -> Manifest:
        """The following generation with these changes."""
        return replace(self, generation=self.generation + 1, **changes)


@dataclass(frozen=True)
class ManifestState:
    """What a look into the folder found: the newest valid manifest, the valid ones before it, and what was refused.

    `refused`: newer manifest files that are damaged, each with the reason. Empty in a healthy store.
    """

    newest: Manifest
    older: tuple[Manifest, ...]
    refused: tuple[tuple[Path, str], ...]

    def segment_names(self) -> frozenset[str]:
        """Files that some valid manifest still needs."""
        return frozenset(entry.name for manifest in (self.newest, *self.older) for entry in manifest.segments)


def manifest_path(folder: Path, generation: int) -> Path:
    """File of that generation."""
    return folder / f"manifest-{generation:08d}.json"


def manifest_files(folder: Path) -> list[Path]:
    """Manifest files, newest first."""
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit: a reader sees the generation before or this one, also after a power cut."""
    body = asdict(manifest) | {"format": FORMAT}
    write_json(manifest_path(folder, manifest.generation), {"body": body, "sha256": _digest(body)})


def load_manifests(folder: Path) -> ManifestState:
    """Look for the newest valid manifest. No manifest is an empty store; only damaged ones raise StoreError."""
    # A writer may have moved on since the folder was listed, and taken away every file that was seen: look again.
    for _ in range(LOOKS):
        valid, refused = _look(folder)
        if valid:
            break
    if not valid and refused:
        raise StoreError(
            f"trajectory store {folder}: no valid manifest ({'; '.join(reason for _, reason in refused)})",
            "restore a manifest file from a copy, or move the folder away to start an empty store",
        )
    return ManifestState(valid[0] if valid else Manifest(), tuple(valid[1:]), tuple(refused))


def _look(folder: Path) -> tuple[list[Manifest], list[tuple[Path, str]]]:
    """Valid manifests, newest first, and damaged ones newer than those."""
    valid: list[Manifest] = []
    refused: list[tuple[Path, str]] = []
    for path in manifest_files(folder):
        try:
            valid.append(_read_manifest(path))
        except FileNotFoundError:
            continue
        except _DamagedManifest as error:
            if not valid:
                refused.append((path, str(error)))
    return valid, refused


class _DamagedManifest(Exception):
    """The file is not what was written; an earlier one may be."""


def _read_manifest(path: Path) -> Manifest:
    """Raises FileNotFoundError, _DamagedManifest, and StoreError for a format of another version."""
    try:
        content = json.loads(path.read_bytes())
        body = content["body"]
        if content["sha256"] != _digest(body):
            raise _DamagedManifest(f"{path.name}: its checksum does not match")
        if body["format"] != FORMAT:
            raise StoreError(
                f"{path}: written in format {body['format']}, this version of Nightjar reads format {FORMAT}",
                "use the version that wrote it, or move the store's folder away to start an empty one",
            )
        return Manifest(
            generation=int(body["generation"]),
            segments=tuple(_entry(entry) for entry in body["segments"]),
            nights=tuple(body["nights"]),
            tokenizer_digest=body["tokenizer_digest"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _DamagedManifest(f"{path.name}: {error}") from None


def _entry(content: Mapping[str, Any]) -> SegmentEntry:
    annotation = content["annotation"]
    return SegmentEntry(
        name=content["name"],
        rows=int(content["rows"]),
        size=int(content["size"]),
        sha256=content["sha256"],
        annotation=None if annotation is None else AnnotationKey(annotation["kind"], annotation["model_digest"]),
    )


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

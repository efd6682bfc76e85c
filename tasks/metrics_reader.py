"""Reading a stage's metrics.jsonl onwards from where the last delivery stopped, also after the stage rewound it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAIL_BYTES = 256


@dataclass(frozen=True)
class Bookmark:
    """How far a file was read, in bytes, and a hash of what stands right before, to notice that it was rewritten."""

    offset: int = 0
    tail: str = ""


@dataclass(frozen=True)
class Line:
    """One complete line, parsed, and the offset right after it."""

    content: dict[str, Any]
    end: int


def lines_after(path: Path, bookmark: Bookmark) -> tuple[list[Line], bool]:
    """Complete lines behind the bookmark, and whether the file was rewritten (then: all lines from the start).

    A torn last line is left for the next time; a line that is no JSON object is skipped.
    """
    if not path.exists():
        return [], False
    rewritten = bookmark.offset > 0 and _tail_before(path, bookmark.offset) != bookmark.tail
    start = 0 if rewritten else bookmark.offset
    with path.open("rb") as stream:
        stream.seek(start)
        parts = stream.read().split(b"\n")
    found, end = [], start
    for part in parts[:-1]:
        end += len(part) + 1
        try:
            content = json.loads(part)
        except ValueError:
            continue
        if isinstance(content, dict):
            found.append(Line(content, end))
    return found, rewritten


def bookmark_at(path: Path, offset: int) -> Bookmark:
    """The bookmark for a position in the file."""
    return Bookmark(offset, _tail_before(path, offset)) if offset else Bookmark()


def _tail_before(path: Path, offset: int) -> str:
    if path.stat().st_size < offset:
        return "shorter"
    with path.open("rb") as stream:
        stream.seek(max(0, offset - _TAIL_BYTES), os.SEEK_SET)
        return hashlib.sha256(stream.read(min(offset, _TAIL_BYTES))).hexdigest()

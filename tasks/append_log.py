"""An append-only file of JSON lines that survives being killed in the middle of a line."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.registry_errors import JournalError
from training.contract import fsync_folder, json_of

SEAL = b" #torn"
"""Ends a line whose writer died; written by the next append, so that a fragment never grows into a record."""


@dataclass(frozen=True)
class LogContents:
    """Records in file order, and how many fragments of dead writers lie between or after them."""

    records: tuple[Mapping[str, Any], ...]
    torn: int
    lines: tuple[int, ...] = ()
    """Where each record stands in the file, counted from 1."""
    unsealed: bool = False
    """Whether the last line is a fragment that nothing has closed yet."""


class AppendLog:
    """One JSON object a line, numbered by `seq` from 1, each fsynced before `append` returns.

    A line counts only when its newline is there. A torn last line is counted in `torn`, and sealed by the next append.
    """

    def __init__(self, path: Path, way_out: str = "restore the file from a backup, or move it aside") -> None:
        self.path = path
        self.way_out = way_out

    def append(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a record and return it with its `seq`. Raises OSError (disk full) with the log still readable."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        with self._locked() as descriptor:
            contents = self.read()
            numbered = {"seq": 0, **record} | {"seq": len(contents.records) + 1}
            line = json.dumps(numbered, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            if _ends_in_fragment(descriptor):
                _write_whole(descriptor, SEAL + b"\n", self.path)
            _write_whole(descriptor, line, self.path)
        if is_new:
            fsync_folder(self.path.parent)
        return numbered

    def seal(self) -> bool:
        """Close the fragment that a dead writer left at the end; says whether there was one."""
        if not self.read().unsealed:
            return False
        with self._locked() as descriptor:
            # Under the lock nobody is writing, so what still lacks its newline will never get it.
            is_torn = _ends_in_fragment(descriptor)
            if is_torn:
                _write_whole(descriptor, SEAL + b"\n", self.path)
        return is_torn

    def read(self) -> LogContents:
        """All records. Raises JournalError naming the line that is neither a record nor a sealed fragment."""
        *lines, rest = self._content().split(b"\n")
        records: list[Mapping[str, Any]] = []
        numbers: list[int] = []
        torn = 1 if rest else 0
        for number, line in enumerate(lines, start=1):
            if line.endswith(SEAL):
                torn += 1
            else:
                records.append(self._parse(line, number, expected_seq=len(records) + 1))
                numbers.append(number)
        return LogContents(tuple(records), torn, tuple(numbers), bool(rest))

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise JournalError(f"{self.path} cannot be read: {error.strerror or error}", self.way_out) from None

    def _parse(self, line: bytes, number: int, expected_seq: int) -> Mapping[str, Any]:
        try:
            record = json_of(line.decode())
        except (ValueError, RecursionError):
            raise self._broken(number, "is not JSON") from None
        if not isinstance(record, dict) or record.get("seq") != expected_seq:
            raise self._broken(number, f"does not carry seq {expected_seq}: a line was lost, doubled or edited")
        return record

    def _broken(self, number: int, what: str) -> JournalError:
        return JournalError(f"{self.path}: line {number} {what}", self.way_out)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, open for appending, with no other writer; readers need no lock."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _ends_in_fragment(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _write_whole(descriptor: int, content: bytes, path: Path) -> None:
    written = os.write(descriptor, content)
    if written != len(content):
        raise OSError(f"{path}: only {written} of {len(content)} bytes were written; is the disk full?")
    os.fsync(descriptor)

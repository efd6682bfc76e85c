"""Segments: immutable Arrow IPC files of one record batch each, read through a memory map."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from training.contract import fsync_folder, sha256_file
from training.errors import StoreError
from training.replay.annotation import ANNOTATION_SCHEMA, AnnotationKey
from training.replay.trajectory import TRAJECTORY_SCHEMA

MAX_SEGMENT_ROWS = 8_192
MAX_SEGMENT_BYTES = 64 * 2**20
"""Rows and bytes of content after which the next segment begins, so that rewriting one never needs much memory."""


@dataclass(frozen=True)
class SegmentEntry:
    """What the manifest promises about one segment file. `annotation` is None for a segment of trajectories."""

    name: str
    rows: int
    size: int
    sha256: str
    annotation: AnnotationKey | None = None


@dataclass(frozen=True)
class RaggedColumn:
    """A list column: `values` and `offsets` are views of the mapped file, `start` is where the values lie in it."""

    values: NDArray[Any]
    offsets: NDArray[np.int32]
    valid: NDArray[np.bool_] | None
    start: int

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Length of each row; 0 for null."""
        return np.diff(self.offsets)


class Segment:
    """An open segment. Columns are read-only views of the memory-mapped file; long rows are read beside the map.

    A page that was touched through the map counts as resident, and a kernel with large folios maps some MiB for one
    touch: a few hundred sampled rows would make the whole store resident. `row` therefore reads its bytes from the same
    file by position, which the page cache serves as fast and which leaves nothing behind.
    """

    def __init__(self, path: Path, entry: SegmentEntry) -> None:
        """Map the file. Raises FileNotFoundError when it is gone, ArrowInvalid when it is no such file."""
        self.entry = entry
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._mapped = pa.py_buffer(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ))
        reader = pa.ipc.open_file(self._mapped)
        if reader.num_record_batches != 1:
            raise pa.ArrowInvalid(f"{reader.num_record_batches} record batches instead of one")
        self.batch: pa.RecordBatch = reader.get_batch(0)
        self._plain: dict[str, NDArray[Any]] = {}

    @property
    def ids(self) -> list[str]:
        """trajectory_id of each row."""
        return [str(value) for value in self.batch.column("trajectory_id").to_pylist()]

    def ragged(self, name: str) -> RaggedColumn:
        """A list column."""
        return self._ragged[name]

    def row(self, name: str, i: int) -> NDArray[Any] | None:
        """Row i of a list column, the caller's own; None for null. Raises StoreError when the file was cut short."""
        column = self._ragged[name]
        if column.valid is not None and not column.valid[i]:
            return None
        first, end = int(column.offsets[i]), int(column.offsets[i + 1])
        values = np.empty(end - first, dtype=column.values.dtype)
        if os.preadv(self._descriptor, [values.data], column.start + first * values.itemsize) != values.nbytes:
            raise _damaged(self._path, "it ends before its rows do")
        return values

    def plain(self, name: str) -> NDArray[Any]:
        """A column of numbers or flags; null floats are NaN."""
        if name not in self._plain:
            self._plain[name] = self.batch.column(name).to_numpy(zero_copy_only=False)
        return self._plain[name]

    @cached_property
    def _ragged(self) -> dict[str, RaggedColumn]:
        columns = {}
        for field in self.batch.schema:
            if not pa.types.is_list(field.type):
                continue
            column = self.batch.column(field.name)
            valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
            values = column.values.to_numpy()
            start = values.ctypes.data - self._mapped.address
            columns[field.name] = RaggedColumn(values, column.offsets.to_numpy(), valid, start)
        return columns


def write_segment(folder: Path, name: str, batch: pa.RecordBatch, annotation: AnnotationKey | None) -> SegmentEntry:
    """Write a segment durably under its final name. Until a manifest names it, it does not count."""
    path, temporary = folder / name, folder / f".{name}.tmp"
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        with temporary.open("r+b") as stream:
            os.fsync(stream.fileno())
        entry = SegmentEntry(name, batch.num_rows, temporary.stat().st_size, sha256_file(temporary), annotation)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk the half-written file is what is in the way
        raise
    fsync_folder(folder)
    return entry


def open_segment(folder: Path, entry: SegmentEntry, *, verify: bool = True) -> Segment:
    """Map a segment. Raises FileNotFoundError when it is gone, StoreError naming it when it is not what was promised.

    `verify` reads the file once to compare its sha256; the bytes pass through a small buffer, not through the map.
    """
    path = folder / entry.name
    if path.stat().st_size != entry.size or (verify and sha256_file(path) != entry.sha256):
        raise _damaged(path, "its content is not what the manifest recorded")
    try:
        segment = Segment(path, entry)
    except pa.ArrowInvalid as error:
        raise _damaged(path, f"not an Arrow file of the store: {error}") from None
    expected = TRAJECTORY_SCHEMA if entry.annotation is None else ANNOTATION_SCHEMA
    if segment.batch.num_rows != entry.rows or not segment.batch.schema.equals(expected):
        raise _damaged(path, f"it does not hold {entry.rows} rows of the expected columns")
    return segment


def split_rows(row_bytes: NDArray[np.int64]) -> Iterator[slice]:
    """Cut rows of these sizes into runs that fit a segment; a row that is too large alone gets its own."""
    start, filled = 0, 0
    for row, size in enumerate(row_bytes.tolist()):
        if row > start and (row - start >= MAX_SEGMENT_ROWS or filled + size > MAX_SEGMENT_BYTES):
            yield slice(start, row)
            start, filled = row, 0
        filled += size
    if start < len(row_bytes):
        yield slice(start, len(row_bytes))


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(
        f"trajectory store segment {path.name} in {path.parent} is damaged: {why}",
        "restore that file from a copy, or call TrajectoryStore.repair(path) to go on without its rows",
    )

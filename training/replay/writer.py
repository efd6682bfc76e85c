"""The one writer of a store: segment files first, then one manifest by rename."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from training.errors import StoreError
from training.replay.annotation import AnnotationKey
from training.replay.eviction import fragmented, rewrite
from training.replay.index import StoreIndex, build_index
from training.replay.lock import WriterLock
from training.replay.manifest import write_manifest
from training.replay.recovery import prune, segments_folder
from training.replay.segment import SegmentEntry, write_segment

logger = logging.getLogger(__name__)

SMALL_SEGMENTS = 64
"""Small segments of one column after which an append merges them: each open one costs two file descriptors."""


class StoreWriter:
    """Holds the lock and the newest generation. Each public act is one commit, or none."""

    def __init__(self, path: Path, index: StoreIndex, lock: WriterLock) -> None:
        self.path = path
        self.index = index
        self._lock = lock
        self._failed = False

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def commit(self, **changes: Any) -> None:
        """Make the manifest with these changes the truth.

        After a failure here nothing more is written: the disk may be a step ahead of this object.
        """
        self._check()
        manifest = self.index.manifest.next(**changes)
        self._failed = True
        try:
            write_manifest(self.path, manifest)
        except OSError as error:
            raise self._cannot_write(error) from error
        self.index = build_index(segments_folder(self.path), manifest, self.index.by_name(), verify=False)
        self._failed = False
        try:
            prune(self.path)
        except OSError as error:  # litter, not loss: the next commit or opening removes it
            logger.warning("trajectory store %s: cannot remove old files: %s", self.path, error)

    def add_segments(self, batches: Iterable[pa.RecordBatch], key: AnnotationKey | None) -> None:
        """Append one segment a batch: annotations `key`, or trajectories for None."""
        added = [self._write(batch, key, number) for number, batch in enumerate(batches)]
        if added:
            self.commit(segments=(*self.index.manifest.segments, *added))
        if fragmented(self.index, SMALL_SEGMENTS):
            self.rewrite(np.ones(len(self.index), dtype=bool), list(self.index.annotations))

    def rewrite(self, keep: NDArray[np.bool_], keys: Collection[AnnotationKey]) -> None:
        """Keep these rows and annotation columns alone, and merge small segments."""
        written: list[SegmentEntry] = []

        def write(batch: pa.RecordBatch, key: AnnotationKey | None) -> SegmentEntry:
            written.append(self._write(batch, key, len(written)))
            return written[-1]

        entries = rewrite(self.index, keep, keys, write)
        if entries != self.index.manifest.segments:
            self.commit(segments=entries)

    def _write(self, batch: pa.RecordBatch, key: AnnotationKey | None, number: int) -> SegmentEntry:
        """A segment file of the next generation, not yet part of the store."""
        self._check()
        label = "trajectories" if key is None else key.kind
        name = f"{self.index.manifest.generation + 1:08d}-{number:04d}-{label}.arrow"
        try:
            return write_segment(segments_folder(self.path), name, batch, key)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _check(self) -> None:
        if self._failed:
            raise StoreError(f"trajectory store {self.path}: an earlier write failed", "open the store again")

    def _cannot_write(self, error: OSError) -> StoreError:
        return StoreError(
            f"trajectory store {self.path}: cannot write: {error}",
            "free disk space or mend the folder's permissions, and open it again; what was committed is intact",
        )

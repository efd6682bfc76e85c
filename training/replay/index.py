"""Where each trajectory and annotation lies: an immutable picture of one generation of the store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.errors import StoreError
from training.replay.annotation import AnnotationKey
from training.replay.manifest import Manifest
from training.replay.segment import Segment, open_segment

ABSENT = -1

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """For each row of the store: the segment (a place in `segments`) and the row in it; ABSENT where there is none."""

    segments: tuple[Segment, ...]
    segment: NDArray[np.int32]
    row: NDArray[np.int32]

    @property
    def present(self) -> NDArray[np.bool_]:
        """Which rows have a place."""
        present: NDArray[np.bool_] = self.segment != ABSENT
        return present

    def gather(self, positions: NDArray[np.int64], name: str, dtype: Any) -> NDArray[Any]:
        """Numbers of column `name` at these positions [n]."""
        result = np.empty(len(positions), dtype=dtype)
        for chosen, segment, rows in self.by_segment(positions):
            result[chosen] = segment.plain(name)[rows]
        return result

    def strings(self, positions: NDArray[np.int64], name: str) -> list[str | None]:
        """Strings of column `name` at these positions [n]."""
        result: list[str | None] = [None] * len(positions)
        for chosen, segment, rows in self.by_segment(positions):
            values = segment.batch.column(name).take(rows).to_pylist()
            for place, value in zip(chosen.tolist(), values, strict=True):
                result[place] = value
        return result

    def lengths(self, positions: NDArray[np.int64], name: str) -> NDArray[np.int32]:
        """List lengths of column `name` at these positions [n]."""
        result = np.empty(len(positions), dtype=np.int32)
        for chosen, segment, rows in self.by_segment(positions):
            result[chosen] = segment.ragged(name).lengths[rows]
        return result

    def lists(self, positions: NDArray[np.int64], name: str) -> list[NDArray[Any] | None]:
        """Lists of column `name` at these positions, copied; None where null or absent."""
        places = zip(self.segment[positions].tolist(), self.row[positions].tolist(), strict=True)
        return [None if number == ABSENT else self.segments[number].row(name, row) for number, row in places]

    def by_segment(self, positions: Int64s) -> Iterable[tuple[Int64s, Segment, NDArray[np.int32]]]:
        """(where in `positions`, segment, rows in it) for each segment touched."""
        numbers = self.segment[positions]
        for number in np.unique(numbers).tolist():
            if number != ABSENT:
                chosen = np.flatnonzero(numbers == number)
                yield chosen, self.segments[number], self.row[positions[chosen]]


@dataclass(frozen=True)
class StoreIndex:
    """One generation, opened. Stays readable whatever a writer does later: open files outlive their names."""

    manifest: Manifest
    ids: tuple[str, ...]
    position: dict[str, int]
    trajectories: Places
    annotations: dict[AnnotationKey, Places]

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, ids: Iterable[str]) -> NDArray[np.int64]:
        """Places of these trajectories [n]. Raises StoreError naming the first that is not stored."""
        try:
            return np.array([self.position[trajectory_id] for trajectory_id in ids], dtype=np.int64)
        except KeyError as error:
            raise StoreError(
                f"trajectory {error.args[0]} is not in the store",
                "it was never appended, or a later eviction dropped it; build the view anew",
            ) from None

    def annotation(self, key: AnnotationKey) -> Places:
        """Places of that annotation; all absent where nobody made it."""
        found = self.annotations.get(key)
        return found if found is not None else self.nowhere

    @cached_property
    def nowhere(self) -> Places:
        """The places of an annotation that no trajectory has."""
        return _nowhere(len(self))

    def by_name(self) -> dict[str, Segment]:
        """Every open segment by file name."""
        groups = [self.trajectories.segments, *(places.segments for places in self.annotations.values())]
        return {segment.entry.name: segment for group in groups for segment in group}


def build_index(folder: Path, manifest: Manifest, opened: dict[str, Segment], *, verify: bool) -> StoreIndex:
    """Open what `manifest` names. Raises FileNotFoundError, StoreError.

    Segments in `opened` are taken as they are; those opened here are added to it.
    """
    groups: dict[AnnotationKey | None, list[Segment]] = {None: []}
    for entry in manifest.segments:
        segment = opened.get(entry.name)
        if segment is None or segment.entry != entry:
            segment = opened[entry.name] = open_segment(folder, entry, verify=verify)
        groups.setdefault(entry.annotation, []).append(segment)
    rows = groups.pop(None)
    ids = [trajectory_id for segment in rows for trajectory_id in segment.ids]
    position = {trajectory_id: place for place, trajectory_id in enumerate(ids)}
    if len(position) != len(ids):
        raise StoreError(f"trajectory store {folder}: a trajectory is stored twice; the writer never does that")
    counts = [segment.entry.rows for segment in rows]
    trajectories = Places(
        tuple(rows),
        np.repeat(np.arange(len(rows), dtype=np.int32), counts),
        np.concatenate([np.arange(count, dtype=np.int32) for count in counts] or [np.empty(0, dtype=np.int32)]),
    )
    annotations = {key: _annotation_places(group, position) for key, group in groups.items() if key is not None}
    return StoreIndex(manifest, tuple(ids), position, trajectories, annotations)


def _annotation_places(segments: list[Segment], position: dict[str, int]) -> Places:
    """Places by trajectory; annotations of evicted trajectories are passed over."""
    places = _nowhere(len(position))
    for number, segment in enumerate(segments):
        at = np.array([position.get(trajectory_id, ABSENT) for trajectory_id in segment.ids], dtype=np.int64)
        rows = np.flatnonzero(at != ABSENT)
        places.segment[at[rows]] = number
        places.row[at[rows]] = rows
    return Places(tuple(segments), places.segment, places.row)


def _nowhere(count: int) -> Places:
    return Places((), np.full(count, ABSENT, dtype=np.int32), np.full(count, ABSENT, dtype=np.int32))

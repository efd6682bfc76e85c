"""What leaves the store, and rewriting what stays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from training.replay.annotation import AnnotationKey
from training.replay.index import StoreIndex
from training.replay.segment import MAX_SEGMENT_BYTES, MAX_SEGMENT_ROWS, Segment, SegmentEntry

Writer = Callable[[pa.RecordBatch, AnnotationKey | None], SegmentEntry]


@dataclass(frozen=True)
class EvictionReport:
    """How many trajectories went, and why: `stale` by age or policy version, `over_capacity` as the oldest of many."""

    stale: int
    over_capacity: int
    remaining: int


def plan_eviction(
    index: StoreIndex,
    *,
    capacity: int | None,
    max_age_nights: int | None,
    current_night: int | None,
    drop_policy_versions: Collection[str],
) -> tuple[NDArray[np.bool_], EvictionReport]:
    """Which rows stay [rows], and the report. Stale rows go first, then oldest nights, in a night oldest rows."""
    everything = np.arange(len(index), dtype=np.int64)
    keep = np.ones(len(index), dtype=bool)
    nights = index.trajectories.gather(everything, "created_night", np.int64)
    if max_age_nights is not None:
        if current_night is None:
            raise ValueError("max_age_nights needs current_night")
        keep &= current_night - nights <= max_age_nights
    if drop_policy_versions:
        dropped = frozenset(drop_policy_versions)
        versions = index.trajectories.strings(everything, "policy_version")
        keep &= np.array([version not in dropped for version in versions], dtype=bool)
    stale = int((~keep).sum())
    if capacity is not None and int(keep.sum()) > capacity:
        staying = np.flatnonzero(keep)
        oldest_first = staying[np.argsort(nights[staying], kind="stable")]
        keep[oldest_first[: len(staying) - capacity]] = False
    remaining = int(keep.sum())
    return keep, EvictionReport(stale, len(index) - stale - remaining, remaining)


def rewrite(
    index: StoreIndex, keep: NDArray[np.bool_], keys: Collection[AnnotationKey], write: Writer
) -> tuple[SegmentEntry, ...]:
    """Segments that hold the rows to keep and their annotations `keys`, in the same order; small neighbours are merged.

    A segment that stays whole and has no small neighbour is kept as it is.
    """
    edges = np.cumsum([0, *(segment.entry.rows for segment in index.trajectories.segments)]).tolist()
    masks = [keep[start:end] for start, end in pairwise(edges)]
    entries = _merge(index.trajectories.segments, masks, write)
    for key in sorted(keys):
        places = index.annotations[key]
        alive = [np.zeros(segment.entry.rows, dtype=bool) for segment in places.segments]
        for number, row in zip(places.segment[keep].tolist(), places.row[keep].tolist(), strict=True):
            if number >= 0:
                alive[number][row] = True
        entries += _merge(places.segments, alive, write)
    return tuple(entries)


def fragmented(index: StoreIndex, limit: int = 16) -> bool:
    """Whether some column has more than `limit` segments that merging would fill: opening the store gets slow."""
    groups = [index.trajectories.segments, *(places.segments for places in index.annotations.values())]
    return any(sum(_is_small(segment.entry) for segment in group) > limit for group in groups)


def _is_small(entry: SegmentEntry) -> bool:
    return 2 * entry.rows < MAX_SEGMENT_ROWS and 2 * entry.size < MAX_SEGMENT_BYTES


def _merge(segments: Sequence[Segment], masks: Sequence[NDArray[np.bool_]], write: Writer) -> list[SegmentEntry]:
    entries: list[SegmentEntry] = []
    waiting: list[tuple[Segment, NDArray[np.bool_]]] = []
    rows, size = 0, 0.0
    for segment, mask in zip(segments, masks, strict=True):
        alive = int(mask.sum())
        if alive == 0:
            continue
        alive_size = segment.entry.size * alive / segment.entry.rows
        if waiting and (rows + alive > MAX_SEGMENT_ROWS or size + alive_size > MAX_SEGMENT_BYTES):
            entries.append(_flush(waiting, write))
            waiting, rows, size = [], 0, 0.0
        waiting.append((segment, mask))
        rows, size = rows + alive, size + alive_size
    if waiting:
        entries.append(_flush(waiting, write))
    return entries


def _flush(waiting: Sequence[tuple[Segment, NDArray[np.bool_]]], write: Writer) -> SegmentEntry:
    first, mask = waiting[0]
    if len(waiting) == 1 and mask.all():
        return first.entry
    batches = [segment.batch.filter(pa.array(mask)) for segment, mask in waiting]
    return write(pa.concat_batches(batches), first.entry.annotation)

"""Counts of a store, for metrics and reports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.replay.annotation import AnnotationKey
from training.replay.index import StoreIndex


@dataclass(frozen=True)
class StoreStats:
    """One generation in numbers.

    `size`: bytes on disk; nights: ordinals, None for an empty store; `estimated_share`: of rows without recorded
    behaviour log-probs; `annotations`: rows annotated, by kind and model digest.
    """

    trajectories: int
    prompts: int
    tokens: int
    segments: int
    size: int
    generation: int
    estimated_share: float
    oldest_night: int | None
    newest_night: int | None
    annotations: tuple[tuple[AnnotationKey, int], ...]


def store_stats(index: StoreIndex) -> StoreStats:
    """Count."""
    everything = np.arange(len(index), dtype=np.int64)
    rows = index.trajectories
    nights = rows.gather(everything, "created_night", np.int64)
    estimated = [source == "estimated" for source in rows.strings(everything, "behavior_source")]
    lengths = [rows.lengths(everything, name) for name in ("prompt_ids", "response_ids")]
    return StoreStats(
        trajectories=len(index),
        prompts=len(set(rows.strings(everything, "prompt_id"))),
        tokens=sum(int(column.sum(dtype=np.int64)) for column in lengths),
        segments=len(index.manifest.segments),
        size=sum(entry.size for entry in index.manifest.segments),
        generation=index.manifest.generation,
        estimated_share=float(np.mean(estimated)) if estimated else 0.0,
        oldest_night=int(nights.min()) if len(nights) else None,
        newest_night=int(nights.max()) if len(nights) else None,
        annotations=tuple((key, int(index.annotations[key].present.sum())) for key in sorted(index.annotations)),
    )

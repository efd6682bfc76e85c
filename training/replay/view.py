"""A fixed choice of stored trajectories, read by index. What a later night appends or evicts does not change it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from training.contract import write_json
from training.errors import StoreError
from training.replay.annotation import AnnotationDigests
from training.replay.index import Places, StoreIndex

VIEW_FORMAT = 1

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which trajectories a view takes: those that meet every condition; None is none. Nights: ordinals, inclusive."""

    prompt_ids: Collection[str] | None = None
    policy_versions: Collection[str] | None = None
    sources: Collection[str] | None = None
    first_night: int | None = None
    last_night: int | None = None


@dataclass(frozen=True)
class TrajectoryBatch:
    """B trajectories. Ragged columns are lists of arrays that the caller may write to.

    `behavior_log_probs` [R] of each: those recorded, else the estimate of the view's model, else None; `estimated`
    [B] tells which rows have none recorded. `ref_log_probs` [R] of each, None where not annotated. `scores` [B]: see
    `StoreView.scores`; `reward_source` [B] says whose they are: the view's model by digest, or as stored.
    `temperature`, `top_p` [B] are NaN and `top_k` [B] is -1 where nothing was recorded.
    """

    trajectory_ids: list[str]
    prompt_id: list[str]
    prompt_ids: list[Int32s]
    response_ids: list[Int32s]
    behavior_log_probs: list[Float32s | None]
    ref_log_probs: list[Float32s | None]
    estimated: NDArray[np.bool_]
    scores: Float32s
    reward_source: list[str | None]
    eos: NDArray[np.bool_]
    created_night: NDArray[np.int64]
    policy_version: list[str]
    source: list[str]
    temperature: Float32s
    top_p: Float32s
    top_k: Int32s

    def __len__(self) -> int:
        """B."""
        return len(self.trajectory_ids)


class StoreView:
    """N trajectories in a fixed order, with the annotations of named models. Columns below are [N]."""

    def __init__(self, index: StoreIndex, positions: NDArray[np.int64], digests: AnnotationDigests) -> None:
        self._index = index
        self._positions = positions
        self.annotations = digests

    def __len__(self) -> int:
        """N."""
        return len(self._positions)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """trajectory_id of each."""
        return tuple(self._index.ids[place] for place in self._positions.tolist())

    @cached_property
    def prompt_id(self) -> tuple[str, ...]:
        """prompt_id of each: the group for a preference filter."""
        return tuple(_texts(self._rows.strings(self._positions, "prompt_id")))

    @cached_property
    def scores(self) -> Float32s:
        """Reward of each: the model's if the view names one, else the one it was stored with; NaN where missing."""
        if self.annotations.score is None:
            return self._plain("score", np.float32)
        return _single(self._annotation("score"), self._positions)

    @cached_property
    def estimated(self) -> NDArray[np.bool_]:
        """Which have no recorded behaviour log-probs."""
        sources = self._rows.strings(self._positions, "behavior_source")
        return np.array([source == "estimated" for source in sources], dtype=bool)

    @property
    def estimated_share(self) -> float:
        """Share without recorded behaviour log-probs; 0 for an empty view."""
        return float(self.estimated.mean()) if len(self) else 0.0

    @cached_property
    def prompt_lengths(self) -> Int32s:
        """Prompt tokens of each."""
        return self._rows.lengths(self._positions, "prompt_ids")

    @cached_property
    def response_lengths(self) -> Int32s:
        """Response tokens of each."""
        return self._rows.lengths(self._positions, "response_ids")

    @cached_property
    def created_night(self) -> NDArray[np.int64]:
        """Ordinal of the night that stored each."""
        return self._plain("created_night", np.int64)

    def batch(self, indices: ArrayLike) -> TrajectoryBatch:
        """The trajectories at these indices 0..N-1, in their order. Raises IndexError for one outside."""
        chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if outside.size:
            raise IndexError(f"trajectory {outside[0]} of a view of {len(self)}")
        at, rows = self._positions[chosen], self._rows
        recorded = rows.lists(at, "behavior_log_probs")
        estimates = self._annotation("behavior_log_probs").lists(at, "values")
        return TrajectoryBatch(
            trajectory_ids=[self._index.ids[place] for place in at.tolist()],
            prompt_id=_texts(rows.strings(at, "prompt_id")),
            prompt_ids=_present(rows.lists(at, "prompt_ids")),
            response_ids=_present(rows.lists(at, "response_ids")),
            behavior_log_probs=[a if a is not None else b for a, b in zip(recorded, estimates, strict=True)],
            ref_log_probs=self._annotation("ref_log_probs").lists(at, "values"),
            estimated=np.array([values is None for values in recorded], dtype=bool),
            scores=self.scores[chosen],
            reward_source=self._reward_source(at),
            eos=rows.gather(at, "eos", np.bool_),
            created_night=rows.gather(at, "created_night", np.int64),
            policy_version=_texts(rows.strings(at, "policy_version")),
            source=_texts(rows.strings(at, "source")),
            temperature=rows.gather(at, "temperature", np.float32),
            top_p=rows.gather(at, "top_p", np.float32),
            top_k=np.nan_to_num(rows.gather(at, "top_k", np.float64), nan=-1.0).astype(np.int32),
        )

    def require_annotated(self) -> None:
        """Raise StoreError naming the first trajectory that lacks what training needs.

        That is: log-probs of the reference, log-probs of the writer, and a score.
        """
        behavior = ~self.estimated | self._annotation("behavior_log_probs").present[self._positions]
        checks = {
            "ref_log_probs": self._annotation("ref_log_probs").present[self._positions],
            "behavior_log_probs": behavior,
            "score": ~np.isnan(self.scores),
        }
        for name, present in checks.items():
            if not present.all():
                first = self.ids[int(np.flatnonzero(~present)[0])]
                raise StoreError(
                    f"{int((~present).sum())} of {len(self)} trajectories have no {name}, first {first}",
                    "annotate the store with that model before training on it, and name its digest in the view",
                )

    def manifest(self) -> dict[str, Any]:
        """This view as JSON: ids in order, model digests, and a checksum over the rows' ids and plain columns."""
        return {
            "format": VIEW_FORMAT,
            "trajectory_ids": list(self.ids),
            "annotations": asdict(self.annotations),
            "sha256": self._digest(),
        }

    def write_manifest(self, path: Path) -> None:
        """Write `manifest()` durably."""
        write_json(path, self.manifest())

    def _reward_source(self, at: NDArray[np.int64]) -> list[str | None]:
        if self.annotations.score is not None:
            return [self.annotations.score] * len(at)
        return self._rows.strings(at, "reward_source")

    @property
    def _rows(self) -> Places:
        return self._index.trajectories

    def _annotation(self, kind: str) -> Places:
        keys = {str(key.kind): key for key in self.annotations.columns()}
        return self._index.annotation(keys[kind]) if kind in keys else self._index.nowhere

    def _plain(self, name: str, dtype: Any) -> NDArray[Any]:
        return self._rows.gather(self._positions, name, dtype)

    def _digest(self) -> str:
        digest = hashlib.sha256("\n".join(self.ids).encode())
        for column in (self.scores, self.estimated, self.created_night):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()


def view_of_manifest(index: StoreIndex, content: Mapping[str, Any]) -> StoreView:
    """The view that `StoreView.manifest` described. Raises StoreError when it is not one, or the rows are not those."""
    try:
        if content["format"] != VIEW_FORMAT:
            raise StoreError(f"view manifest of format {content['format']}, this version reads {VIEW_FORMAT}")
        digests = AnnotationDigests(**content["annotations"])
        view = StoreView(index, index.positions(content["trajectory_ids"]), digests)
        expected = content["sha256"]
    except (KeyError, TypeError) as error:
        raise StoreError(f"not a view manifest: {error!r}") from None
    if view._digest() != expected:
        raise StoreError(
            "the store's rows differ from those the view manifest was written for",
            "a trajectory was evicted and stored again; start the stage anew instead of resuming it",
        )
    return view


def select(index: StoreIndex, wanted: TrajectoryFilter) -> NDArray[np.int64]:
    """Positions of the trajectories that pass, in the store's order."""
    everything = np.arange(len(index), dtype=np.int64)
    keep = np.ones(len(index), dtype=bool)
    asked = (
        ("prompt_id", wanted.prompt_ids),
        ("policy_version", wanted.policy_versions),
        ("source", wanted.sources),
    )
    for name, allowed in asked:
        if allowed is not None:
            values = index.trajectories.strings(everything, name)
            accepted = frozenset(allowed)
            keep &= np.array([value in accepted for value in values], dtype=bool)
    nights = index.trajectories.gather(everything, "created_night", np.int64)
    if wanted.first_night is not None:
        keep &= nights >= wanted.first_night
    if wanted.last_night is not None:
        keep &= nights <= wanted.last_night
    return np.flatnonzero(keep)


def _single(places: Places, positions: NDArray[np.int64]) -> Float32s:
    """First value of each list; NaN where absent."""
    result = np.full(len(positions), np.nan, dtype=np.float32)
    for chosen, segment, rows in places.by_segment(positions):
        column = segment.ragged("values")
        result[chosen] = column.values[column.offsets[rows]]
    return result


def _texts(values: Sequence[str | None]) -> list[str]:
    return [value for value in values if value is not None]


def _present(values: Sequence[NDArray[Any] | None]) -> list[NDArray[Any]]:
    return [value for value in values if value is not None]

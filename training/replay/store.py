"""The trajectory store: append-only Arrow segments on disk, memory-mapped, with a manifest. pyarrow and numpy only.

    <path>/
      manifest-00000012.json   the newest valid one is the truth; the one before it is kept
      segments/                immutable files; one that no manifest names does not count
      quarantine/              what a recovery set aside, never deleted by the store
      writer.lock

A write is: segment files, fsync, then one manifest by rename. Whatever dies in between leaves the generation before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from training.contract import read_json
from training.errors import DataError, StoreError
from training.replay.annotation import AnnotationDigests, AnnotationKey, AnnotationKind, annotation_batch
from training.replay.eviction import EvictionReport, fragmented, plan_eviction
from training.replay.index import StoreIndex
from training.replay.lock import WriterLock
from training.replay.manifest import Manifest
from training.replay.recovery import RepairReport, clean, describe_fallback, read_store, repair, segments_folder
from training.replay.segment import split_rows
from training.replay.stats import StoreStats, store_stats
from training.replay.trajectory import Trajectory, check_token_values, check_trajectory, row_size, trajectory_batch
from training.replay.view import StoreView, TrajectoryFilter, select, view_of_manifest
from training.replay.writer import StoreWriter


class TrajectoryStore:
    """Trajectories of many nights, and what models say about them. Get one from `TrajectoryStore.open`, as in `with`.

    One writer at a time, any number of readers in other processes. A store object is not for several threads at once.
    """

    def __init__(self, path: Path, index: StoreIndex, writer: StoreWriter | None, recovery: str | None) -> None:
        """Use `open` instead."""
        self.path = path
        self.recovery = recovery
        """What `open` had to fall back from (a damaged manifest), or None."""
        self._read_index = index
        self._writer = writer

    @classmethod
    def open(
        cls, path: Path, *, writable: bool = False, tokenizer_digest: str | None = None, verify: bool = True
    ) -> TrajectoryStore:
        """Open the store in folder `path`. A writer makes the folder, takes the lock and clears what a crash left.

        `tokenizer_digest`: digest of the tokenizer whose ids the caller reads and writes; the first writer's is kept
        and another one is refused. `verify` compares every segment's sha256 (about a second a GB).

        A damaged newest manifest is passed over for the one before it, said in `recovery` and in the log; a writer then
        moves what the older one does not know into `quarantine/`. Raises StoreError for a store that is missing, locked
        by another writer, damaged (naming the segment), or of another tokenizer.
        """
        path = Path(path)
        if not writable:
            if not path.is_dir():
                raise StoreError(f"{path}: no trajectory store", "open it writable once, or check the folder's name")
            state, index = read_store(path, verify=verify)
            _check_tokenizer(path, state.newest, tokenizer_digest)
            return cls(path, index, None, describe_fallback(path, state))
        segments_folder(path).mkdir(parents=True, exist_ok=True)
        lock = WriterLock(path / "writer.lock")
        try:
            state, index = read_store(path, verify=verify)
            _check_tokenizer(path, state.newest, tokenizer_digest)
            recovery = describe_fallback(path, state)
            clean(path, state)
            writer = StoreWriter(path, index, lock)
            if tokenizer_digest is not None and state.newest.tokenizer_digest is None:
                writer.commit(tokenizer_digest=tokenizer_digest)
        except BaseException:
            lock.release()
            raise
        return cls(path, index, writer, recovery)

    @staticmethod
    def repair(path: Path) -> RepairReport:
        """Go on without what is damaged: bad segments move into `quarantine/`, and with them their rows.

        Trajectories lost there are lost; lost annotations are made again by the next annotate pass. Takes the writer's
        lock. Raises StoreError when there is no store, or no valid manifest to go by.
        """
        path = Path(path)
        if not path.is_dir():
            raise StoreError(f"{path}: no trajectory store", "check the folder's name")
        lock = WriterLock(path / "writer.lock")
        try:
            return repair(path)
        finally:
            lock.release()

    def close(self) -> None:
        """Release the writer's lock. Views stay readable."""
        if self._writer is not None:
            self._read_index = self._writer.index
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Trajectories stored."""
        return len(self._index)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._index.position

    @property
    def ids(self) -> tuple[str, ...]:
        """trajectory_id of every trajectory, in the order of appending."""
        return self._index.ids

    def refresh(self) -> None:
        """Let a reader see what has been committed since. Views made before stay as they are."""
        if self._writer is None:
            self._read_index = read_store(self.path, opened=self._read_index.by_name())[1]

    def begin_night(self, night: str) -> int:
        """The ordinal of the night of that name, for `created_night` and `evict`; a new name counts one on."""
        nights = self._index.manifest.nights
        if night in nights:
            return nights.index(night)
        self._writing().commit(nights=(*nights, night))
        return len(nights)

    def append(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """Store these trajectories, all or none of them; returns their ids in order.

        One that is already stored (same prompt, response and policy version) is not stored again, and what is stored
        stays as it is. Raises DataError naming the first that cannot be stored.
        """
        writer = self._writing()
        new: dict[str, Trajectory] = {}
        ids = []
        for number, trajectory in enumerate(trajectories):
            check_trajectory(trajectory, f"trajectory {number} (prompt_id {trajectory.prompt_id!r})")
            trajectory_id = trajectory.trajectory_id
            ids.append(trajectory_id)
            if trajectory_id not in self._index.position:
                new.setdefault(trajectory_id, trajectory)
        rows = list(new.items())
        sizes = np.array([row_size(trajectory) for trajectory in new.values()], dtype=np.int64)
        writer.add_segments((trajectory_batch(rows[part]) for part in split_rows(sizes)), None)
        return ids

    def annotate(self, model_digest: str, kind: AnnotationKind, values: Mapping[str, ArrayLike]) -> int:
        """Store what the model of that digest says about trajectories, {trajectory_id: values}, all or none.

        values: [R] log-probs in nats, or one number for kind `score`. What is already there stays. Returns how many
        were new. Raises StoreError for an unknown trajectory, DataError for values of the wrong length, not finite,
        or estimates of behaviour log-probs that were recorded.
        """
        writer = self._writing()
        key = AnnotationKey(kind, model_digest)
        arrays = {name: np.atleast_1d(np.asarray(row, dtype=np.float32)) for name, row in values.items()}
        self._check_annotations(kind, arrays)
        new = self.missing(model_digest, kind, arrays)
        rows = [(trajectory_id, arrays[trajectory_id]) for trajectory_id in new]
        sizes = np.array([80 + row[1].nbytes for row in rows], dtype=np.int64)
        writer.add_segments((annotation_batch(rows[part]) for part in split_rows(sizes)), key)
        return len(rows)

    def missing(self, model_digest: str, kind: AnnotationKind, ids: Iterable[str] | None = None) -> list[str]:
        """Those of `ids` (default: all stored) that the model has yet to annotate, in order.

        For kind `behavior_log_probs` a trajectory with recorded ones needs nothing. Raises StoreError for an unknown
        id.
        """
        index = self._index
        positions = np.arange(len(index), dtype=np.int64) if ids is None else index.positions(ids)
        absent = ~index.annotation(AnnotationKey(kind, model_digest)).present[positions]
        if kind == "behavior_log_probs":
            absent &= ~self._recorded(positions)
        return [index.ids[place] for place in positions[absent].tolist()]

    def view(
        self, chosen: Iterable[str] | TrajectoryFilter | None = None, annotations: AnnotationDigests | None = None
    ) -> StoreView:
        """A fixed view: these trajectories in this order, or those that pass a filter, or all, in appending order.

        `annotations` names the models whose log-probs and scores it reads. Raises StoreError for an unknown id.
        """
        if chosen is None or isinstance(chosen, TrajectoryFilter):
            positions = select(self._index, chosen or TrajectoryFilter())
        else:
            positions = self._index.positions(chosen)
        return StoreView(self._index, positions, annotations or AnnotationDigests())

    def view_from_manifest(self, manifest: Path | Mapping[str, Any]) -> StoreView:
        """The view that wrote that manifest, whatever was appended since. Raises StoreError when its rows are gone."""
        content = read_json(manifest) if isinstance(manifest, Path) else manifest
        return view_of_manifest(self._index, content)

    def evict(
        self,
        *,
        capacity: int | None = None,
        max_age_nights: int | None = None,
        current_night: int | None = None,
        drop_policy_versions: Collection[str] = (),
        keep_annotations_of: Collection[str] | None = None,
    ) -> EvictionReport:
        """Drop what is stale, then the oldest beyond `capacity`; rewrite and merge segments where that is due.

        Stale: older than `max_age_nights` nights at `current_night` (an ordinal from `begin_night`), or written by
        one of `drop_policy_versions`. `keep_annotations_of`: model digests; annotations of all others go too (None:
        none go).
        """
        writer, index = self._writing(), self._index
        keep, report = plan_eviction(
            index,
            capacity=capacity,
            max_age_nights=max_age_nights,
            current_night=current_night,
            drop_policy_versions=drop_policy_versions,
        )
        keys = [k for k in index.annotations if keep_annotations_of is None or k.model_digest in keep_annotations_of]
        if not keep.all() or len(keys) < len(index.annotations) or fragmented(index):
            writer.rewrite(keep, keys)
        return report

    def compact(self) -> None:
        """Merge small segments. Changes no row, no order, no annotation."""
        self._writing().rewrite(np.ones(len(self), dtype=bool), list(self._index.annotations))

    def stats(self) -> StoreStats:
        """Counts for metrics and reports."""
        return store_stats(self._index)

    @property
    def _index(self) -> StoreIndex:
        return self._read_index if self._writer is None else self._writer.index

    def _writing(self) -> StoreWriter:
        if self._writer is None:
            raise StoreError(f"trajectory store {self.path}: opened for reading, or closed", "open it writable")
        return self._writer

    def _recorded(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        sources = self._index.trajectories.strings(positions, "behavior_source")
        return np.array([source == "recorded" for source in sources], dtype=bool)

    def _check_annotations(self, kind: AnnotationKind, values: Mapping[str, NDArray[np.float32]]) -> None:
        ids = list(values)
        positions = self._index.positions(ids)
        if kind == "behavior_log_probs" and (recorded := self._recorded(positions)).any():
            raise DataError(
                f"trajectory {ids[int(np.flatnonzero(recorded)[0])]}: its behavior_log_probs were recorded and stay",
                "estimate only what missing(...) returns",
            )
        lengths = self._index.trajectories.lengths(positions, "response_ids").tolist()
        for trajectory_id, length in zip(ids, lengths, strict=True):
            where = f"{kind} of trajectory {trajectory_id}"
            check_token_values(values[trajectory_id], 1 if kind == "score" else length, where)


def _check_tokenizer(path: Path, manifest: Manifest, tokenizer_digest: str | None) -> None:
    stored = manifest.tokenizer_digest
    if stored is not None and tokenizer_digest is not None and stored != tokenizer_digest:
        raise StoreError(
            f"trajectory store {path}: its token ids are of tokenizer {stored[:12]}, yours is {tokenizer_digest[:12]}",
            "use the model family that wrote it, or move the store's folder away to start an empty one",
        )

"""One stored trajectory: its record, its identity, its row. pyarrow and numpy only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from training.errors import DataError

BehaviorSource = Literal["recorded", "estimated"]

TRAJECTORY_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("behavior_log_probs", pa.list_(pa.float32())),
        pa.field("behavior_source", pa.string(), nullable=False),
        pa.field("policy_version", pa.string(), nullable=False),
        pa.field("score", pa.float32()),
        pa.field("reward_source", pa.string()),
        pa.field("created_night", pa.int64(), nullable=False),
        pa.field("temperature", pa.float32()),
        pa.field("top_p", pa.float32()),
        pa.field("top_k", pa.int32()),
        pa.field("eos", pa.bool_(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class SamplingSettings:
    """The distribution that a response was drawn from. `top_p` 1 and `top_k` 0 turn the cuts off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One prompt and one answer to it, as token ids; nothing of it ever changes once stored.

    `prompt_id`: sha256 of the normalised prompt, shared by its answers. `response_ids` hold the end token where `eos`
    (the answer ended by itself rather than at the length limit). `policy_version`: who wrote the answer (a model
    digest, a registry version, the name of an outside model). `created_night`: ordinal from
    `TrajectoryStore.begin_night`. `behavior_log_probs` [R], nats: log-probs recorded while sampling, of the
    distribution really sampled, with `sampling` beside them; None where nobody recorded any. `score`: the reward it
    came with, named by `reward_source`. `source`: where the row came from.

    For example an answer that the champion sampled last night:

        Trajectory("9f2c...", [1, 17, 4], [8, 8, 2], policy_version="models:/demo/3", created_night=4, eos=True,
                   behavior_log_probs=[-0.1, -1.2, -0.4], sampling=SamplingSettings(temperature=0.7))
    """

    prompt_id: str
    prompt_ids: ArrayLike
    response_ids: ArrayLike
    policy_version: str
    created_night: int
    eos: bool
    behavior_log_probs: ArrayLike | None = None
    sampling: SamplingSettings | None = None
    score: float | None = None
    reward_source: str | None = None
    source: str = ""

    @property
    def trajectory_id(self) -> str:
        """sha256 over prompt tokens, response tokens and policy version."""
        prompt = np.asarray(self.prompt_ids, dtype="<i4").tobytes()
        response = np.asarray(self.response_ids, dtype="<i4").tobytes()
        digest = hashlib.sha256(len(prompt).to_bytes(8, "little") + len(response).to_bytes(8, "little"))
        digest.update(prompt + response + self.policy_version.encode())
        return digest.hexdigest()


def trajectory_batch(trajectories: Sequence[tuple[str, Trajectory]]) -> pa.RecordBatch:
    """Rows of TRAJECTORY_SCHEMA from (trajectory_id, checked trajectory)."""
    ids, rows = [pair[0] for pair in trajectories], [pair[1] for pair in trajectories]
    sampling = [row.sampling for row in rows]
    columns: dict[str, pa.Array] = {
        "trajectory_id": ids,
        "prompt_id": [row.prompt_id for row in rows],
        "prompt_ids": list_array([np.asarray(row.prompt_ids, dtype=np.int32) for row in rows], pa.int32()),
        "response_ids": list_array([np.asarray(row.response_ids, dtype=np.int32) for row in rows], pa.int32()),
        "behavior_log_probs": list_array([_float32_or_none(row.behavior_log_probs) for row in rows], pa.float32()),
        "behavior_source": ["estimated" if row.behavior_log_probs is None else "recorded" for row in rows],
        "policy_version": [row.policy_version for row in rows],
        "score": [row.score for row in rows],
        "reward_source": [row.reward_source for row in rows],
        "created_night": [row.created_night for row in rows],
        "temperature": [None if kept is None else kept.temperature for kept in sampling],
        "top_p": [None if kept is None else kept.top_p for kept in sampling],
        "top_k": [None if kept is None else kept.top_k for kept in sampling],
        "eos": [row.eos for row in rows],
        "source": [row.source for row in rows],
    }
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, type=TRAJECTORY_SCHEMA.field(name).type)
        for name, values in columns.items()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=TRAJECTORY_SCHEMA)


def list_array(rows: Sequence[NDArray[Any] | None], value_type: pa.DataType) -> pa.Array:
    """A list column from one array a row, None for null."""
    lengths = np.array([0 if row is None else len(row) for row in rows], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]).astype(np.int32)
    present = [row for row in rows if row is not None]
    values = pa.array(np.concatenate(present) if present else [], type=value_type)
    absent = np.array([row is None for row in rows], dtype=bool)
    null_mask = pa.array(absent) if absent.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values, mask=null_mask)


def row_size(trajectory: Trajectory) -> int:
    """About how many bytes the row takes in a segment."""
    a_token = 4 if trajectory.behavior_log_probs is None else 8
    return 250 + 4 * np.size(trajectory.prompt_ids) + a_token * np.size(trajectory.response_ids)


def check_trajectory(trajectory: Trajectory, where: str) -> None:
    """Raise DataError, beginning with `where`, when the trajectory cannot be stored."""
    _check_tokens(trajectory.prompt_ids, f"{where}: prompt_ids")
    _check_tokens(trajectory.response_ids, f"{where}: response_ids")
    if not trajectory.prompt_id or not trajectory.policy_version:
        raise DataError(f"{where}: prompt_id and policy_version must not be empty")
    if trajectory.score is not None and not np.isfinite(trajectory.score):
        raise DataError(f"{where}: score is {trajectory.score}", "store None where the reward failed")
    if trajectory.behavior_log_probs is None:
        return
    check_token_values(trajectory.behavior_log_probs, np.size(trajectory.response_ids), f"{where}: behavior_log_probs")
    if trajectory.sampling is None:
        raise DataError(
            f"{where}: recorded behavior_log_probs without the sampling settings of the distribution they belong to",
            "pass sampling=SamplingSettings(temperature, top_p, top_k), or leave them out to have them estimated",
        )


def check_token_values(values: ArrayLike, length: int, where: str) -> None:
    """Raise DataError unless `values` is [length] and finite."""
    array = np.asarray(values, dtype=np.float32)
    if array.shape != (length,):
        raise DataError(f"{where}: shape {array.shape}, but the response has {length} tokens")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise DataError(f"{where}: value {array[bad[0]]} at place {bad[0]}")


def _check_tokens(tokens: ArrayLike, where: str) -> None:
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0:
        raise DataError(f"{where}: must be a non-empty list of token ids, got shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise DataError(f"{where}: token ids must be whole numbers in 0..2^31-1")


def _float32_or_none(values: ArrayLike | None) -> NDArray[np.float32] | None:
    return None if values is None else np.asarray(values, dtype=np.float32)

"""What models say about stored trajectories, kept by the digest of the model that said it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from training.replay.trajectory import list_array

AnnotationKind = Literal["ref_log_probs", "behavior_log_probs", "score"]
"""`ref_log_probs` [R] of the frozen reference; `behavior_log_probs` [R] estimated where none were recorded;
`score`, one number from a reward model."""

ANNOTATION_KINDS: tuple[str, ...] = get_args(AnnotationKind)

ANNOTATION_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("values", pa.list_(pa.float32()), nullable=False),
    ]
)


@dataclass(frozen=True, order=True)
class AnnotationKey:
    """One annotation column: its kind and the digest of the model that made it."""

    kind: AnnotationKind
    model_digest: str

    def __post_init__(self) -> None:
        if self.kind not in ANNOTATION_KINDS:
            raise ValueError(f"annotation kind {self.kind!r} is none of {', '.join(ANNOTATION_KINDS)}")
        if not self.model_digest:
            raise ValueError(f"annotation {self.kind}: the model digest must not be empty")


@dataclass(frozen=True)
class AnnotationDigests:
    """Which model's annotations a view reads: a model digest for each kind, None for no such annotation."""

    ref_log_probs: str | None = None
    behavior_log_probs: str | None = None
    score: str | None = None

    def columns(self) -> tuple[AnnotationKey, ...]:
        """The annotation columns named here."""
        named: list[tuple[AnnotationKind, str | None]] = [
            ("ref_log_probs", self.ref_log_probs),
            ("behavior_log_probs", self.behavior_log_probs),
            ("score", self.score),
        ]
        return tuple(AnnotationKey(kind, digest) for kind, digest in named if digest is not None)


def annotation_batch(rows: Sequence[tuple[str, NDArray[np.float32]]]) -> pa.RecordBatch:
    """Rows of ANNOTATION_SCHEMA from (trajectory_id, values); a score is a list of one."""
    ids = pa.array([row[0] for row in rows], type=pa.string())
    values = list_array([row[1] for row in rows], pa.float32())
    return pa.RecordBatch.from_arrays([ids, values], schema=ANNOTATION_SCHEMA)

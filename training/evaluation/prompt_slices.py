"""Which prompts belong to which slice of the report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from configs.schema.metric_names import LENGTH_SLICES
from training.errors import GateError


def slice_members(**dimensions: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """`slice_members(category=["sum", "sum", "joke"])` -> {"category=joke": [F, F, T], "category=sum": [T, T, F]}.

    One label a prompt in every dimension; a prompt with an empty label is in no slice of it.
    Raises GateError when the dimensions differ in length.
    """
    lengths = {name: len(labels) for name, labels in dimensions.items()}
    if len(set(lengths.values())) > 1:
        raise GateError(f"slices: every dimension needs one label a prompt, got {lengths}")
    return {
        f"{name}={label}": np.array([own.strip() == label for own in labels], dtype=np.bool_)
        for name, labels in dimensions.items()
        for label in sorted({own.strip() for own in labels} - {""})
    }


def length_buckets(lengths: Sequence[int]) -> list[str]:
    """short, medium or long for each prompt [N] (tokens or characters), by the thirds of this prompt set.

    The evaluation prompts are frozen, so the thirds are the same every night. Equal lengths share a bucket.
    """
    if len(lengths) == 0:
        return []
    edges = np.quantile(np.asarray(lengths, dtype=np.float64), [1 / 3, 2 / 3])
    return [LENGTH_SLICES[int(np.searchsorted(edges, length, side="left"))] for length in lengths]

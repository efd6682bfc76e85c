"""Which prompt goes where. By hash, so a prompt never changes side, and evaluation stays the same every night."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from configs.schema.data import DataConfig


class Split(StrEnum):
    """The three parts of a snapshot."""

    TRAIN = "train"
    VALIDATION = "validation"
    EVALUATION = "evaluation"


def side_of(prompt_id: str, config: DataConfig) -> Split:
    """The side of a prompt: a function of its id, the salt and the two shares, of nothing else."""
    place = unit_interval(config.split_salt, prompt_id)
    if place < config.evaluation_fraction:
        return Split.EVALUATION
    if place < config.evaluation_fraction + config.validation_fraction:
        return Split.VALIDATION
    return Split.TRAIN


def split_settings(config: DataConfig) -> dict[str, str | float]:
    """What decides the sides; part of a snapshot's identity."""
    return {
        "salt": config.split_salt,
        "evaluation_fraction": config.evaluation_fraction,
        "validation_fraction": config.validation_fraction,
    }


def unit_interval(*parts: str) -> float:
    """A number in [0, 1) from a hash of the parts."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def evaluation_rows(prompt_ids: Sequence[str], eligible: Sequence[bool], limit: int) -> list[int]:
    """Row numbers of the evaluation prompts: the first eligible row of each, the oldest `limit` prompts in row order.

    Partitions are read in the order of their dates, so later nights add at the end and the chosen ones stay.
    """
    chosen: dict[str, int] = {}
    for number, (prompt, may) in enumerate(zip(prompt_ids, eligible, strict=True)):
        if may and prompt not in chosen:
            if len(chosen) == limit:
                break
            chosen[prompt] = number
    return list(chosen.values())


def keep_at_most(row_ids: Sequence[str], limit: int | None, seed: int) -> npt.NDArray[np.bool_]:
    """[rows], True for the kept ones: those whose seeded hash is smallest, whatever the order of the rows."""
    kept = np.ones(len(row_ids), dtype=bool)
    if limit is not None and len(row_ids) > limit:
        ranks = np.array([unit_interval(f"max_rows/{seed}", row_id) for row_id in row_ids])
        kept[np.argsort(ranks, kind="stable")[limit:]] = False
    return kept

"""The second look: what becomes of each sound row once all of them are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from configs.schema.data import DataConfig
from training.data.gather import Gathered, row_fields
from training.data.near_duplicates import LikenessIndex, band_keys, fields_of, near_duplicates
from training.data.reasons import Dropped, Reason
from training.data.schema import Row
from training.data.splits import Split, evaluation_rows, keep_at_most, side_of
from training.data.spool import RowSpool

Fate = Split | Dropped | Reason
"""Where a row goes: a split, left out, or (contradicting labels) to quarantine."""


def decide(gathered: Gathered, spool: RowSpool, config: DataConfig, seed: int, frozen: Sequence[Row]) -> list[Fate]:
    """One fate a spooled row.

    With `frozen` rows evaluation is those and nothing else; without, it is the oldest prompts of its side of the hash.
    Left-over rows of the evaluation side serve as validation: training never sees them.
    """
    fates: list[Fate] = [side_of(prompt, config) for prompt in gathered.prompt_ids]
    for number in gathered.ledger.contradicted:
        fates[number] = Reason.CONTRADICTING_LABELS
    if config.near_duplicate_threshold is not None:
        _drop_near_duplicates(fates, gathered, spool, config.near_duplicate_threshold)
    evaluation = _choose_evaluation(fates, gathered, config, frozen)
    if config.near_duplicate_threshold is not None:
        held = list(frozen) or [spool.fetch(number).row for number in evaluation]
        _drop_overlap(fates, spool, held, config.near_duplicate_threshold)
    _cap(fates, gathered.row_ids, Split.TRAIN, config.max_rows, seed)
    _cap(fates, gathered.row_ids, Split.VALIDATION, config.max_validation_rows, seed)
    return fates


def _drop_near_duplicates(fates: list[Fate], gathered: Gathered, spool: RowSpool, threshold: float) -> None:
    alive = _numbers(fates, *Split)
    repeated = near_duplicates(
        gathered.key_matrix()[alive], threshold, lambda place: row_fields(spool.fetch(int(alive[place])).row)
    )
    for number in alive[repeated].tolist():
        fates[number] = Dropped.NEAR_DUPLICATE


def _choose_evaluation(fates: list[Fate], gathered: Gathered, config: DataConfig, frozen: Sequence[Row]) -> list[int]:
    """Leave EVALUATION to the chosen rows alone; returns their numbers."""
    if frozen:
        prompts, rows = {row.prompt_id for row in frozen}, {row.row_id for row in frozen}
        # After a change of salt or share a frozen prompt may lie on the training side; it still is not trained on.
        for number in _numbers(fates, Split.TRAIN).tolist():
            if gathered.prompt_ids[number] in prompts:
                fates[number] = Dropped.EVALUATION_OVERLAP
        chosen = [number for number, row_id in enumerate(gathered.row_ids) if row_id in rows]
    else:
        sides = [fate is Split.EVALUATION for fate in fates]
        chosen = evaluation_rows(gathered.prompt_ids, sides, config.evaluation_prompts)
    for number in _numbers(fates, Split.EVALUATION).tolist():
        fates[number] = Split.VALIDATION
    for number in chosen:
        fates[number] = Split.EVALUATION
    return chosen


def _drop_overlap(fates: list[Fate], spool: RowSpool, held: Sequence[Row], threshold: float) -> None:
    """Leave out training rows whose prompt is nearly one of the evaluation prompts."""
    index = LikenessIndex(threshold)
    for row in held:
        fields = fields_of(row.prompt_text)
        index.add(fields, band_keys(fields))
    verdicts: dict[str, bool] = {}
    for number, spooled in enumerate(spool):
        if fates[number] is not Split.TRAIN:
            continue
        prompt = spooled.row.prompt_id
        if prompt not in verdicts:
            fields = fields_of(spooled.row.prompt_text)
            verdicts[prompt] = index.has_like(fields, band_keys(fields))
        if verdicts[prompt]:
            fates[number] = Dropped.EVALUATION_OVERLAP_NEAR


def _cap(fates: list[Fate], row_ids: Sequence[str], split: Split, limit: int | None, seed: int) -> None:
    numbers = _numbers(fates, split)
    kept = keep_at_most([row_ids[number] for number in numbers.tolist()], limit, seed)
    for number in numbers[~kept].tolist():
        fates[number] = Dropped.OVER_MAX_ROWS


def _numbers(fates: Sequence[Fate], *wanted: Fate) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.array([number for number, fate in enumerate(fates) if fate in wanted], dtype=np.intp)

"""A snapshot's rows as a flat table without any text: lengths, ids, roles and sets, for suites and statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

PREFERENCE, TRAJECTORY = "preference", "trajectory"
_BASE = (
    "row_id",
    "row_copies",
    "prompt_id",
    "prompt_chars",
    "last_role",
    "label",
    "label_weight",
    "source",
    "category",
    "partition",
)
COLUMNS = {
    PREFERENCE: (*_BASE, "chosen_chars", "rejected_chars", "sides_equal"),
    TRAJECTORY: (*_BASE, "responses", "shortest_response_chars", "longest_response_chars", "infinite_rewards"),
}


def kind_of(table: pa.Table) -> str:
    """Whether a split holds preference rows or trajectories; by its first row, the rest is then expected to agree."""
    trajectories = table.num_rows > 0 and table.column("responses")[0].is_valid
    return TRAJECTORY if trajectories else PREFERENCE


def flatten(table: pa.Table, kind: str, row_copies: pa.Array | None = None) -> pd.DataFrame:
    """One line a row, without texts: their lengths in characters, and what the expectations ask about.

    A missing text has a missing length, so that not-null catches it. `row_copies` counts a row's occurrences in the
    whole split; None counts within `table`.
    """
    columns: dict[str, Any] = {
        name: table.column(name).to_pandas()
        for name in ("row_id", "prompt_id", "label", "label_weight", "source", "category", "partition")
    }
    columns["row_copies"] = (copies_of(table) if row_copies is None else row_copies).to_pandas()
    prompts = table.column("prompt").to_pylist()
    columns["prompt_chars"] = [sum(len(turn["content"] or "") for turn in prompt or ()) for prompt in prompts]
    columns["last_role"] = [prompt[-1]["role"] if prompt else None for prompt in prompts]
    columns |= _preference(table) if kind == PREFERENCE else _trajectory(table)
    return pd.DataFrame(columns)[list(COLUMNS[kind])]


def copies_of(table: pa.Table) -> pa.Array:
    """How often each row's id occurs in the table: uniqueness over all batches, counted by Arrow."""
    counts = pc.value_counts(table.column("row_id").combine_chunks())
    places = pc.index_in(table.column("row_id"), value_set=counts.field("values"))
    return pc.take(counts.field("counts"), places).combine_chunks()


def _preference(table: pa.Table) -> dict[str, Any]:
    chosen, rejected = table.column("chosen"), table.column("rejected")
    return {
        "chosen_chars": pc.utf8_length(chosen).to_pandas(),
        "rejected_chars": pc.utf8_length(rejected).to_pandas(),
        "sides_equal": pc.equal(pc.utf8_trim_whitespace(chosen), pc.utf8_trim_whitespace(rejected)).to_pandas(),
    }


def _trajectory(table: pa.Table) -> dict[str, Any]:
    answers = [row or [] for row in table.column("responses").to_pylist()]
    lengths = [[len(item["text"] or "") for item in row] for row in answers]
    rewards = [[item["reward"] for item in row if item["reward"] is not None] for row in answers]
    return {
        "responses": [len(row) for row in answers],
        "shortest_response_chars": [min(row, default=None) for row in lengths],
        "longest_response_chars": [max(row, default=None) for row in lengths],
        "infinite_rewards": [int(np.sum(~np.isfinite(row))) if row else 0 for row in rewards],
    }

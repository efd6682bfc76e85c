"""Snapshots with a change in them, for tests of what a stage does with such rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.training.stages import (
    SPLITS,
)

Run = Callable[..., Any]


def changed_rows(split: str, snapshot: Path, to: Path, change: Callable[[list[dict]], list[dict]]) -> Path:
    """A copy of the snapshot with the rows of one split changed."""
    to.mkdir(parents=True)
    for name in SPLITS:
        table = pq.read_table(snapshot / f"{name}.parquet")
        rows = change(table.to_pylist()) if name == split else table.to_pylist()
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), to / f"{name}.parquet")
    return to


def without_rejected(rows: list[dict]) -> list[dict]:
    return [row | {"rejected": None} for row in rows]

"""The tiny night of these tests itself: every row is dealt, every section is written."""

from __future__ import annotations

from pathlib import Path

from tests.training.stages import (
    SFT,
    SPLITS,
    arithmetic_rows,
    write_snapshot,
    write_stage,
)
from training.contract import read_spec
from training.examples import read_split


def test_a_snapshot_helper_deals_every_row(tmp_path: Path):
    rows = arithmetic_rows()
    folder = write_snapshot(tmp_path / "snapshot", rows)
    found = [row["row_id"] for name in SPLITS for row in read_split(folder, name)]
    assert found == [row.row_id for row in rows]


def test_specs_are_written_with_every_section(tmp_path: Path, snapshot: Path):
    directory = write_stage(tmp_path / "x", "sft", {"snapshot": snapshot})
    assert read_spec(directory).section("sft", type(SFT)) == SFT

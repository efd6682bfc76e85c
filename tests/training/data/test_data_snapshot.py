"""Snapshots are named by content, written whole or not at all, and refuse to be read when they were changed."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from training.data.schema import ROW_SCHEMA, Message, Row, prompt_id
from training.data.snapshot import (
    SnapshotRef,
    SnapshotWriter,
    iter_split,
    open_snapshot,
    read_manifest,
    read_rows_file,
    read_split,
)
from training.data.splits import Split
from training.errors import DataError


def row(number: int) -> Row:
    question = Message(role="user", content=f"Question {number}?")
    if number % 2:
        answers = ({"text": f"A{number}", "source": "m", "reward": 0.5}, {"text": "B", "source": "n", "reward": None})
        return Row(prompt=(question,), responses=answers, reference=str(number), partition="d")
    return Row(prompt=(question,), chosen=f"Yes {number}", rejected="No", label_weight=0.5, partition="d")


def write(parent: Path, rows: int = 6, settings: dict[str, float] | None = None) -> SnapshotRef:
    with SnapshotWriter(parent) as writer:
        for number in range(rows):
            writer.write([*Split][number % 3], row(number))
        return writer.finish("pairs", settings or {"salt": 1.0})


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    ref = write(tmp_path)
    folder = Path(ref.uri)
    assert folder.name == ref.sha256[:16]
    assert ref.num_rows == 6
    assert list(iter_split(folder, "train")) == [row(0), row(3)]
    assert read_split(folder, Split.EVALUATION).schema.equals(ROW_SCHEMA)
    assert read_rows_file(folder / "evaluation.parquet") == [row(2), row(5)]
    manifest = read_manifest(folder)
    assert dict(manifest.rows) == {"train": 2, "validation": 2, "evaluation": 2}
    assert open_snapshot(folder) == ref
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_same_rows_same_name_and_same_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert first.sha256 == second.sha256
    for file in Path(first.uri).iterdir():
        assert file.read_bytes() == (Path(second.uri) / file.name).read_bytes(), file.name


def test_rows_and_split_settings_both_name_it(tmp_path: Path) -> None:
    refs = {write(tmp_path).sha256, write(tmp_path, rows=5).sha256, write(tmp_path, settings={"salt": 2.0}).sha256}
    assert len(refs) == 3
    same_prompts = {
        read_manifest(Path(write(tmp_path, settings={"salt": s}).uri)).evaluation_sha256 for s in (1.0, 2.0)
    }
    assert len(same_prompts) == 1


def test_writing_an_equal_snapshot_keeps_the_old_files(tmp_path: Path) -> None:
    first = write(tmp_path)
    file = Path(first.uri) / "train.parquet"
    os.utime(file, (1, 1))
    assert write(tmp_path) == first
    assert file.stat().st_mtime == 1


def test_a_torn_snapshot_is_refused_by_name_and_healed_by_the_next_night(tmp_path: Path) -> None:
    ref = write(tmp_path)
    file = Path(ref.uri) / "validation.parquet"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"validation\.parquet"):
        open_snapshot(Path(ref.uri))
    assert write(tmp_path) == ref
    assert open_snapshot(Path(ref.uri)) == ref


def test_unfinished_work_leaves_nothing(tmp_path: Path) -> None:
    def give_up() -> None:
        with SnapshotWriter(tmp_path) as writer:
            writer.write(Split.TRAIN, row(0))
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        give_up()
    assert list(tmp_path.iterdir()) == []


def test_folders_and_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a snapshot"):
        open_snapshot(tmp_path)
    with pytest.raises(DataError, match=r"train\.parquet: missing"):
        read_split(tmp_path, "train")
    with pytest.raises(DataError, match=r"train\.parquet: missing"):
        next(iter_split(tmp_path, "train"))
    with pytest.raises(DataError, match="not a file of a snapshot"):
        read_rows_file(tmp_path / "evaluation.parquet")
    pq.write_table(ROW_SCHEMA.empty_table(), tmp_path / "evaluation.parquet")
    with pytest.raises(DataError, match="no rows"):
        read_rows_file(tmp_path / "evaluation.parquet")


def test_prompt_id_ignores_spaces_case_and_unicode_form_but_not_roles() -> None:
    def ident(content: str, role: str = "user") -> str:
        return prompt_id([Message(role=role, content=content)])

    assert ident("Où est  le café?") == ident(" où est le cafe\u0301?\n")
    assert ident("Where?") != ident("Where!")
    assert ident("Where?") != ident("Where?", "tool")
    assert prompt_id([Message(role="user", content="a"), Message(role="user", content="b")]) != ident("a b")


def test_row_id_is_of_the_content_not_the_place() -> None:
    here = Row(prompt=row(0).prompt, chosen="a", rejected="b", source="s", partition="1")
    there = Row(prompt=row(0).prompt, chosen="a", rejected="b", source="t", partition="2")
    assert here.row_id == there.row_id
    assert here.row_id != Row(prompt=row(0).prompt, chosen="b", rejected="a").row_id

"""The Great Expectations suites: what they catch, that nothing empty passes, and that errors are not bad data."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.schema.data import DataConfig
from tasks import expectations
from tasks.expectations import Outcome, SuiteReport, run_expectations
from training.data.flatten import COLUMNS, copies_of, flatten, kind_of
from training.data.schema import ROW_SCHEMA, Message, Row
from training.data.splits import Split

CONFIG = DataConfig(source="x", min_rows=3, allowed_sources=("s",))
PAIR = Row(prompt=(Message(role="user", content="Why?"),), chosen="Yes.", rejected="No.", source="s", partition="p")
ANSWERS = tuple({"text": text, "source": "m", "reward": 0.5} for text in ("secret one", "secret two"))


def pair(number: int) -> dict[str, Any]:
    return replace(PAIR, chosen=f"secret {number}").record()


def trajectory(number: int) -> dict[str, Any]:
    return replace(PAIR, chosen=None, rejected=None, responses=ANSWERS, reference=str(number)).record()


Rows = Callable[[int], list[dict[str, Any]]]


def judge(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    config: DataConfig = CONFIG,
    batch_rows: int = 1000,
    splits: tuple[Split, ...] = (Split.TRAIN,),
) -> SuiteReport:
    """Run the suites on tables that no writer would have let through; every split holds the same rows."""
    table = pa.Table.from_pylist(rows, schema=ROW_SCHEMA)
    monkeypatch.setattr(expectations, "read_split", lambda folder, split: table)
    return run_expectations(tmp_path, config, tmp_path / "docs", batch_rows, splits)


def broken(report: SuiteReport) -> set[tuple[str, str]]:
    return {(result.expectation.removeprefix("expect_"), result.column) for result in report.having(Outcome.FAIL)}


def test_good_pairs_pass_and_the_site_holds_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = judge(tmp_path, monkeypatch, [pair(number) for number in range(5)], splits=tuple(Split))
    assert report.success
    assert {result.split for result in report.results} == {"train", "validation", "evaluation"}
    assert not report.having(Outcome.FAIL) + report.having(Outcome.ERROR)
    pages = list((tmp_path / "docs").rglob("*.html"))
    assert (tmp_path / "docs" / "index.html") in pages
    assert len([page for page in pages if "validations" in page.parts]) == 3
    assert not any("secret" in page.read_text() for page in pages)
    assert not list((tmp_path / "docs").rglob("*.gif"))
    assert os.environ["GX_ANALYTICS_ENABLED"] == "false"


def test_good_trajectories_pass_and_single_answers_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [trajectory(number) for number in range(5)]
    assert not broken(judge(tmp_path, monkeypatch, rows))
    single = [row | {"responses": row["responses"][:1]} for row in rows]
    report = judge(tmp_path, monkeypatch, single)
    assert broken(report) == {("column_values_to_be_between", "responses")}
    assert report.success


def test_broken_pairs_are_caught_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [pair(number) for number in range(12)]
    changes: list[dict[str, Any]] = [
        {"chosen": None},
        {"rejected": " "},
        {"chosen": ""},
        {"rejected": "secret 3 ", "chosen": "secret 3"},
        {"label_weight": 0.0},
        {"label": "maybe"},
        {"source": "t"},
        {"prompt": [Message(role="assistant", content="x")]},
        {"prompt": []},
        {"row_id": rows[11]["row_id"]},
    ]
    changed = [row | change for row, change in zip(rows, changes, strict=False)]
    report = judge(tmp_path, monkeypatch, changed + rows[9:])
    assert broken(report) == {
        ("column_values_to_not_be_null", "chosen_chars"),
        ("column_values_to_not_be_null", "sides_equal"),
        ("column_values_to_be_between", "chosen_chars"),
        ("column_values_to_be_in_set", "sides_equal"),
        ("column_values_to_be_between", "label_weight"),
        ("column_values_to_be_in_set", "label"),
        ("column_values_to_be_in_set", "source"),
        ("column_values_to_be_in_set", "last_role"),
        ("column_values_to_not_be_null", "last_role"),
        ("column_values_to_be_between", "prompt_chars"),
        ("column_values_to_be_between", "row_copies"),
    }
    assert not report.success


def test_an_empty_table_and_a_column_of_nothing_never_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = judge(tmp_path, monkeypatch, [])
    assert ("table_row_count_to_be_between", "") in broken(empty)
    assert not empty.success
    hollow = [pair(number) | {"chosen": None, "rejected": None} for number in range(4)]
    assert {
        ("column_values_to_not_be_null", "chosen_chars"),
        ("column_values_to_not_be_null", "rejected_chars"),
    } <= broken(judge(tmp_path, monkeypatch, hollow))


def test_row_count_is_held_against_min_rows_in_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = judge(tmp_path, monkeypatch, [pair(0), pair(1)], splits=(Split.TRAIN, Split.EVALUATION))
    assert [(result.split, result.what) for result in report.having(Outcome.FAIL)] == [("train", "observed 2")]


def test_empty_validation_is_fine_only_when_none_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [pair(number) for number in range(5)]
    tables = {"train": rows, "validation": [], "evaluation": rows}
    frames = {Split(name): pa.Table.from_pylist(content, schema=ROW_SCHEMA) for name, content in tables.items()}
    monkeypatch.setattr(expectations, "read_split", lambda folder, split: frames[split])
    assert not run_expectations(tmp_path, CONFIG, tmp_path / "docs").success
    without = CONFIG.model_copy(update={"validation_fraction": 0.0})
    assert run_expectations(tmp_path, without, tmp_path / "docs").success


def test_batches_are_added_up_and_copies_seen_across_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [pair(number) for number in range(7)]
    rows[1] |= {"source": "t"}
    rows[6] |= {"source": "t", "row_id": rows[0]["row_id"]}
    report = judge(tmp_path, monkeypatch, rows, batch_rows=3)
    train = {(r.expectation, r.column): r for r in report.results if r.split == "train" and r.outcome is Outcome.FAIL}
    sources = train["expect_column_values_to_be_in_set", "source"]
    assert (sources.unexpected, sources.elements) == (2, 7)
    assert train["expect_column_values_to_be_between", "row_copies"].unexpected == 2
    whole = judge(tmp_path, monkeypatch, rows)
    assert broken(whole) == broken(report)
    assert len(whole.results) == len(report.results)


def test_an_expectation_that_raises_is_an_error_not_bad_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectations, "flatten", lambda *given: flatten(*given).drop(columns=["label_weight"]))
    report = judge(tmp_path, monkeypatch, [pair(number) for number in range(5)])
    assert {result.column for result in report.having(Outcome.ERROR)} == {"label_weight"}
    assert "does not exist" in report.having(Outcome.ERROR)[0].what
    assert not report.success


def test_an_expectation_that_was_not_evaluated_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gx = importlib.import_module("great_expectations")
    run = gx.Checkpoint.run

    def forgetful(*given: Any, **named: Any) -> Any:
        found = run(*given, **named)
        next(iter(found.run_results.values())).results.pop()
        return found

    monkeypatch.setattr(gx.Checkpoint, "run", forgetful)
    report = judge(tmp_path, monkeypatch, [pair(number) for number in range(5)])
    assert {result.expectation for result in report.having(Outcome.ERROR)} == {"suite"}
    assert not report.success


def test_nothing_judged_is_no_success(tmp_path: Path) -> None:
    assert not SuiteReport((), tmp_path).success


@pytest.mark.parametrize("make", [pair, trajectory])
def test_flat_table_has_lengths_and_no_text(make: Callable[[int], dict[str, Any]]) -> None:
    table = pa.Table.from_pylist([make(0), make(1)], schema=ROW_SCHEMA)
    frame = flatten(table, kind_of(table))
    assert tuple(frame.columns) == COLUMNS[kind_of(table)]
    assert not frame.astype(str).map(lambda cell: "secret" in cell).any().any()
    assert frame["prompt_chars"].tolist() == [4, 4]


def test_copies_are_counted() -> None:
    table = pa.Table.from_pylist([pair(0), pair(1), pair(0), pair(0)], schema=ROW_SCHEMA)
    assert copies_of(table).to_pylist() == [3, 1, 3, 3]
    assert copies_of(ROW_SCHEMA.empty_table()).to_pylist() == []

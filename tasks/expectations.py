"""Great Expectations suites, as code, over a snapshot: what every preference and trajectory row must be.

GX sees training/data/flatten.py's table, which holds no user text, so Data Docs can be shown to anyone.
Great Expectations takes seconds to import, so only `run_expectations` and what it calls do.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from configs.schema.data import DataConfig
from training.data.flatten import COLUMNS, PREFERENCE, copies_of, flatten, kind_of
from training.data.schema import LABELS
from training.data.snapshot import read_split
from training.data.splits import Split

if TYPE_CHECKING:
    from great_expectations.data_context.data_context.ephemeral_data_context import EphemeralDataContext

BATCH_ROWS = 250_000
"""Rows a GX batch: larger splits are judged batch by batch and added up."""


class Outcome(StrEnum):
    """PASS and FAIL speak of the data; ERROR says that the expectation itself could not be judged."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"


@dataclass(frozen=True)
class ExpectationResult:
    """One expectation on one split. `unexpected` of `elements` values broke it; `what` says it in words."""

    split: str
    expectation: str
    column: str
    outcome: Outcome
    critical: bool
    unexpected: int
    elements: int
    what: str


@dataclass(frozen=True)
class SuiteReport:
    """Every expectation's result, and the folder of the Data Docs site (index.html)."""

    results: Sequence[ExpectationResult]
    data_docs: Path

    def having(self, outcome: Outcome, critical: bool | None = None) -> list[ExpectationResult]:
        """Results with this outcome (and severity)."""
        return [r for r in self.results if r.outcome is outcome and critical in (None, r.critical)]

    @property
    def success(self) -> bool:
        """No error, and no critical expectation failed; an empty report is no success."""
        return bool(self.results) and not self.having(Outcome.ERROR) and not self.having(Outcome.FAIL, critical=True)


def run_expectations(
    snapshot: Path,
    config: DataConfig,
    data_docs: Path,
    batch_rows: int = BATCH_ROWS,
    splits: Iterable[Split] = tuple(Split),
) -> SuiteReport:
    """Judge the splits of a snapshot and write Data Docs below `data_docs` (replaced)."""
    context = _context(data_docs)
    results = []
    for split in splits:
        table = read_split(snapshot, split)
        if split is Split.VALIDATION and config.validation_fraction == 0 and table.num_rows == 0:
            continue
        kind = kind_of(table)
        least = config.min_rows if split is Split.TRAIN else 1
        runs = [
            _judge(context, str(split), number, flatten(batch, kind, copies), kind, config, least if whole else 1)
            for number, batch, copies, whole in _batches(table, batch_rows)
        ]
        results += _added_up(str(split), runs)
    context.build_data_docs()
    _prune(data_docs)
    return SuiteReport(results, data_docs)


def _batches(table: pa.Table, batch_rows: int) -> Iterator[tuple[int, pa.Table, pa.Array, bool]]:
    """(number, rows, their copies in the whole table, whether this is all of it); an empty table is one empty batch."""
    copies = copies_of(table)
    whole = table.num_rows <= batch_rows
    for number, start in enumerate(range(0, max(table.num_rows, 1), batch_rows)):
        yield number, table.slice(start, batch_rows), copies.slice(start, batch_rows), whole


def _context(data_docs: Path) -> EphemeralDataContext:
    """An ephemeral GX project whose only site is `data_docs`. Nothing is sent anywhere."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    shutil.rmtree(data_docs, ignore_errors=True)
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    for name in list(context.get_site_names()):
        context.delete_data_docs_site(name)
    site: Any = {
        "class_name": "SiteBuilder",
        "show_how_to_buttons": False,
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(data_docs.resolve())},
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }
    context.add_data_docs_site("nightjar", site)
    return context


def _judge(
    context: EphemeralDataContext,
    split: str,
    number: int,
    frame: pd.DataFrame,
    kind: str,
    config: DataConfig,
    least_rows: int,
) -> list[ExpectationResult]:
    """Run the suite of `kind` on one batch. An expectation GX did not evaluate is an ERROR."""
    import great_expectations as gx

    name = f"{split}-{number}"
    suite = context.suites.add(
        gx.ExpectationSuite(name=f"{kind}-{name}", expectations=suite_of(kind, config, least_rows))
    )
    asset = context.data_sources.add_pandas(name).add_dataframe_asset(split)
    batch = asset.add_batch_definition_whole_dataframe(name)
    definition = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=batch, suite=suite))
    checkpoint = context.checkpoints.add(
        gx.Checkpoint(name=name, validation_definitions=[definition], actions=[], result_format="SUMMARY")
    )
    outcome = next(iter(checkpoint.run(batch_parameters={"dataframe": frame}).run_results.values()))
    results = [_result(split, result, len(frame)) for result in outcome.results]
    expected = len(suite.expectations)
    if outcome.statistics["evaluated_expectations"] != expected or len(results) != expected:
        what = f"{len(results)} of {expected} expectations were evaluated"
        results.append(ExpectationResult(split, "suite", "", Outcome.ERROR, True, 0, len(frame), what))
    return results


def suite_of(kind: str, config: DataConfig, least_rows: int) -> list[Any]:
    """The expectations of a kind of row. Not-null stands beside every bound: GX passes bounds on empty columns."""
    import great_expectations.expectations

    gxe: Any = great_expectations.expectations  # its names are made at run time

    def between(column: str, low: float, high: float | None, **more: Any) -> Any:
        return gxe.ExpectColumnValuesToBeBetween(column=column, min_value=low, max_value=high, **more)

    answer = (max(config.min_answer_characters, 1), None)  # spaces at the ends may make a text longer than the limit
    suite: list[Any] = [
        gxe.ExpectTableRowCountToBeBetween(min_value=least_rows),
        gxe.ExpectTableColumnsToMatchSet(column_set=list(COLUMNS[kind]), exact_match=True),
        *(gxe.ExpectColumnValuesToNotBeNull(column=column) for column in COLUMNS[kind]),
        between("row_copies", 1, 1),
        between("prompt_chars", 1, config.max_prompt_characters),
        gxe.ExpectColumnValuesToBeInSet(column="last_role", value_set=["user", "tool"]),
        gxe.ExpectColumnValuesToBeInSet(column="label", value_set=list(LABELS)),
        between("label_weight", 0, 1, strict_min=True),
    ]
    if config.allowed_sources:
        suite.append(gxe.ExpectColumnValuesToBeInSet(column="source", value_set=list(config.allowed_sources)))
    if kind == PREFERENCE:
        suite += [between("chosen_chars", *answer), between("rejected_chars", *answer)]
        suite.append(gxe.ExpectColumnValuesToBeInSet(column="sides_equal", value_set=[False]))
    else:
        suite += [between("responses", 1, None), between("shortest_response_chars", *answer)]
        suite += [between("longest_response_chars", *answer), between("infinite_rewards", 0, 0)]
        # One answer a prompt trains, but teaches the filters nothing about which of several is better.
        suite.append(between("responses", 2, None, severity="warning", mostly=0.5))
    return suite


def _result(split: str, result: Any, rows: int) -> ExpectationResult:
    configured = result.expectation_config
    found = result.result or {}
    raised = _raised(result.exception_info)
    column = str(configured.kwargs.get("column", ""))
    unexpected = int(found.get("unexpected_count", 0) or 0)
    elements = int(found.get("element_count", rows) or 0)
    outcome = Outcome.ERROR if raised else Outcome.PASS if result.success else Outcome.FAIL
    what = raised or f"{unexpected} of {elements} values"
    if not raised and "observed_value" in found and not column:
        what = f"observed {found['observed_value']}"
    critical = str(getattr(configured.severity, "value", configured.severity) or "critical") == "critical"
    return ExpectationResult(split, str(configured.type), column, outcome, critical, unexpected, elements, what)


def _raised(info: Any) -> str | None:
    """The message of an exception inside an expectation, wherever GX put it."""
    if not isinstance(info, dict):
        return None
    if info.get("raised_exception"):
        return str(info.get("exception_message") or "raised without a message")
    messages = (_raised(inner) for inner in info.values() if isinstance(inner, dict))
    return next((message for message in messages if message), None)


def _added_up(split: str, runs: Sequence[Sequence[ExpectationResult]]) -> list[ExpectationResult]:
    """One result an expectation over all batches of a split: the worst outcome, the sums of the counts."""
    if len(runs) == 1:
        return list(runs[0])
    worst = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.ERROR: 2}
    groups: dict[tuple[str, str, bool], list[ExpectationResult]] = {}
    for result in (result for run in runs for result in run):
        groups.setdefault((result.expectation, result.column, result.critical), []).append(result)
    summed = []
    for (expectation, column, critical), group in groups.items():
        outcome = max((result.outcome for result in group), key=worst.__getitem__)
        unexpected, elements = sum(r.unexpected for r in group), sum(r.elements for r in group)
        what = next((r.what for r in group if r.outcome is Outcome.ERROR), f"{unexpected} of {elements} values")
        summed.append(ExpectationResult(split, expectation, column, outcome, critical, unexpected, elements, what))
    return summed


def _prune(data_docs: Path) -> None:
    """The site's tutorial films are megabytes that nobody needs every night."""
    for film in (data_docs / "static" / "images").glob("*.gif"):
        film.unlink()

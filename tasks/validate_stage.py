"""The validate stage: source -> checked, immutable snapshot, with Great Expectations' verdict and Data Docs."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema.data import DataConfig
from tasks.expectations import ExpectationResult, Outcome, SuiteReport, run_expectations
from training.context import StageContext, StageOutcome
from training.data.gather import Progress
from training.data.ingest import Ingested, ingest
from training.data.snapshot import read_manifest
from training.errors import DataError, StageError

QUICKSTART_FOLDER = "quickstart"
SNAPSHOTS_FOLDER = "snapshots"
FROZEN_EVALUATION = "frozen_evaluation"
"""Optional input: the evaluation.parquet of an earlier snapshot, whose prompts are kept."""
SOURCE = "source"
"""Param: where the data lies (path or URI); without it, config's source, or `home`/quickstart for the generator.

Nothing is delivered here: which of the generator's nights have come is decided once, when a night is opened, and the
fingerprint in the params is of what lay there then.
"""


@dataclass(frozen=True)
class Validated:
    """What `validate` made."""

    ingested: Ingested
    suites: SuiteReport

    def outputs(self) -> dict[str, Path]:
        """Paths by role, as the stage's result lists them."""
        return {
            "snapshot": Path(self.ingested.snapshot.uri),
            "quarantine": self.ingested.quarantine,
            "report": self.ingested.report_json,
            "report_markdown": self.ingested.report_markdown,
            "data_docs": self.suites.data_docs,
        }

    def metrics(self) -> dict[str, float]:
        """Counts in rows, and the share quarantined."""
        report = self.ingested.report
        rows = {f"rows_{split}": float(count) for split, count in report.splits.items()}
        return rows | {
            "rows_read": float(report.rows_read),
            "rows_quarantined": float(report.rows_quarantined),
            "rows_dropped": float(sum(report.dropped.values())),
            "quarantine_share": report.quarantine_share,
        }

    def facts(self) -> dict[str, Any]:
        """What the night's report and lineage tags quote."""
        report, manifest = self.ingested.report, read_manifest(Path(self.ingested.snapshot.uri))
        return {
            "snapshot_sha256": manifest.sha256,
            "evaluation_sha256": manifest.evaluation_sha256,
            "num_rows": manifest.num_rows,
            "shape": manifest.shape,
            "splits": dict(report.splits),
            "quarantined": dict(report.quarantined),
            "dropped": dict(report.dropped),
            "partitions": [count.partition for count in report.partitions],
            "warnings": [*report.warnings, *(_sentence(result) for result in self.suites.having(Outcome.FAIL))],
            "expectations": len(self.suites.results),
        }


def run(context: StageContext) -> StageOutcome:
    """The stage: reads section `data`, param `source`, and the optional input `frozen_evaluation`.

    Outputs snapshot, quarantine, report, report_markdown, data_docs. Raises DataError for data a person must mend.
    """
    home = Path(context.spec.home)
    validated = validate(
        context.section("data", DataConfig),
        context.output("validation"),
        seed=context.spec.seed,
        home=home,
        source=context.spec.params.get(SOURCE),
        frozen_evaluation=context.input(FROZEN_EVALUATION) if context.has_input(FROZEN_EVALUATION) else None,
        progress=lambda doing, rows: context.recorder.event("validating", doing=doing, rows=rows),
    )
    context.recorder.record(0, validated.metrics())
    return StageOutcome(validated.outputs(), validated.metrics(), validated.facts())


def validate(
    config: DataConfig,
    out_dir: Path,
    *,
    seed: int,
    home: Path,
    source: str | None = None,
    frozen_evaluation: Path | None = None,
    progress: Progress = lambda doing, rows: None,
) -> Validated:
    """Ingest the configured data, write the snapshot below `home`/snapshots, and judge it with the GX suites.

    Raises DataError (the data is bad) or StageError (an expectation could not be judged, the disk is full); reports
    and quarantine.parquet lie in `out_dir` either way.
    """
    try:
        source_uri = _source_uri(config, source, home)
        ingested = ingest(
            config,
            out_dir,
            seed=seed,
            snapshots=home / SNAPSHOTS_FOLDER,
            source_uri=source_uri,
            frozen_evaluation=frozen_evaluation,
            progress=progress,
        )
        progress("expecting", ingested.snapshot.num_rows)
        suites = run_expectations(Path(ingested.snapshot.uri), config, out_dir / "data_docs")
    except OSError as error:
        raise _disk_error(error, home) from error
    _judge(suites)
    return Validated(ingested, suites)


def _source_uri(config: DataConfig, source: str | None, home: Path) -> str | None:
    """Where to read; None: where the config says."""
    if source is None and config.quickstart is not None:
        return str(home / QUICKSTART_FOLDER)
    return source


def _judge(suites: SuiteReport) -> None:
    errors = suites.having(Outcome.ERROR)
    if errors:
        raise StageError(
            f"{len(errors)} expectations could not be judged: {'; '.join(map(_sentence, errors[:3]))}",
            "this is a fault of the suite or of Great Expectations' version, not of the data",
        )
    failed = suites.having(Outcome.FAIL, critical=True)
    if failed:
        raise DataError(
            f"the snapshot breaks {len(failed)} expectations: {'; '.join(map(_sentence, failed[:3]))}",
            f"see {suites.data_docs / 'index.html'}",
        )
    if not suites.success:
        raise StageError("no expectation was evaluated", "the snapshot or the suites are empty")


def _sentence(result: ExpectationResult) -> str:
    column = f" of {result.column}" if result.column else ""
    return f"{result.split}: {result.expectation}{column}: {result.what}"


def _disk_error(error: OSError, home: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StageError(
            f"no space left while validating: {error}", f"free space on the disk of {home}, then run again"
        )
    return error

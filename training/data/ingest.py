"""From a source to an immutable snapshot, in two looks: rows one by one, then rows together. Torch-free, GX-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.credentials import without_credentials
from configs.schema.data import DataConfig
from training.data.fates import Fate, decide
from training.data.gather import Gathered, Progress, gather
from training.data.reading import Source, open_source
from training.data.reasons import Dropped, Problem, Reason
from training.data.report import ValidationReport, summarise_lengths
from training.data.schema import Row
from training.data.snapshot import SnapshotRef, SnapshotWriter, read_rows_file
from training.data.splits import Split, split_settings
from training.data.spool import Quarantine, RowSpool
from training.data.tally import Measure, ordered
from training.data.verdict import judge_quarantine, judge_splits, warnings_of

QUARANTINE_NAME = "quarantine.parquet"


@dataclass(frozen=True)
class Ingested:
    """A snapshot, the rows refused or left out on the way, and the report with its two files."""

    snapshot: SnapshotRef
    quarantine: Path
    report: ValidationReport
    report_json: Path
    report_markdown: Path


@dataclass(frozen=True)
class _Job:
    """What one ingestion works on."""

    config: DataConfig
    source: Source
    out_dir: Path
    snapshots: Path
    seed: int
    frozen: Sequence[Row]
    progress: Progress


def ingest(
    config: DataConfig,
    out_dir: Path,
    *,
    seed: int,
    snapshots: Path | None = None,
    source_uri: str | None = None,
    frozen_evaluation: Path | None = None,
    progress: Progress = lambda doing, rows: None,
) -> Ingested:
    """Validate `config.source` (or `source_uri`) and write a snapshot below `snapshots` (default `out_dir`/snapshots).

    `frozen_evaluation` is the evaluation.parquet of an earlier snapshot: those prompts are taken over as they are and
    trained on by nobody. Raises DataError; quarantine.parquet and the report are then in `out_dir` already.
    """
    source = open_source(source_uri or config.source or "")
    frozen = [] if frozen_evaluation is None else read_rows_file(frozen_evaluation)
    out_dir.mkdir(parents=True, exist_ok=True)
    job = _Job(config, source, out_dir, snapshots or out_dir / "snapshots", seed, frozen, progress)
    spool = RowSpool(out_dir / ".spool.arrow")
    quarantine = Quarantine(out_dir / QUARANTINE_NAME)
    try:
        return _ingest(job, spool, quarantine)
    finally:
        quarantine.close()
        spool.discard()


def _ingest(job: _Job, spool: RowSpool, quarantine: Quarantine) -> Ingested:
    # 1. Each row by itself, and pairs that contradict each other; too many bad ones end the night here.
    gathered = gather(job.source, job.config, spool, quarantine, job.progress)
    spool.seal()
    _refuse_contradictions(gathered, spool, quarantine)
    draft = _report(job, gathered, {}, Measure())
    draft.write(job.out_dir)
    judge_quarantine(draft, job.config, quarantine.path)
    # 2. Rows together: likeness, sides, and what evaluation must not share with training.
    job.progress("comparing", len(spool))
    fates = decide(gathered, spool, job.config, job.seed, job.frozen)
    # 3. The snapshot, read back, and the report.
    job.progress("writing", len(spool))
    return _write(job, gathered, spool, fates, quarantine)


def _refuse_contradictions(gathered: Gathered, spool: RowSpool, quarantine: Quarantine) -> None:
    problem = Problem(Reason.CONTRADICTING_LABELS, "the same pair occurs with its sides exchanged")
    for number in sorted(gathered.ledger.contradicted):
        spooled = spool.fetch(number)
        partition = gathered.partitions[number]
        quarantine.add(spooled.file, spooled.number, partition, problem, spooled.row.record())
        gathered.tally.count_quarantined(problem.reason, partition, f"{spooled.file} row {spooled.number}")


def _write(job: _Job, gathered: Gathered, spool: RowSpool, fates: Sequence[Fate], quarantine: Quarantine) -> Ingested:
    measure = Measure()
    with SnapshotWriter(job.snapshots) as writer:
        for row in job.frozen:
            writer.write(Split.EVALUATION, row)
        for spooled, fate in zip(spool, fates, strict=True):
            gathered.tally.count_fate(fate, spooled.row.partition)
            # Rows above a limit are as good as those that the seed chose, and may be millions: they are only counted.
            if isinstance(fate, Dropped) and fate is not Dropped.OVER_MAX_ROWS:
                quarantine.leave_out(spooled.file, spooled.number, spooled.row.partition, fate, spooled.row.record())
            if isinstance(fate, Split):
                measure.add(spooled.row)
                # A frozen evaluation row was written already, from the earlier snapshot.
                if fate is not Split.EVALUATION or not job.frozen:
                    writer.write(fate, spooled.row)
        report = _report(job, gathered, writer.rows, measure)
        report.write(job.out_dir)
        judge_splits(report, job.config)
        snapshot = writer.finish(gathered.shape, split_settings(job.config))
    report = replace(report, snapshot_sha256=snapshot.sha256)
    report_json, report_markdown = report.write(job.out_dir)
    quarantine.close()
    return Ingested(snapshot, quarantine.path, report, report_json, report_markdown)


def _report(job: _Job, gathered: Gathered, splits: Mapping[str, int], measure: Measure) -> ValidationReport:
    tally = gathered.tally
    report = ValidationReport(
        source=without_credentials(job.source.uri),
        shape=gathered.shape,
        rows_read=tally.rows_read,
        splits=splits,
        quarantined=ordered(tally.quarantined),
        dropped=ordered(tally.dropped),
        examples=dict(tally.examples),
        partitions=tally.partitions(),
        lengths=summarise_lengths(measure.lengths),
        longer_chosen_share=measure.longer_chosen_share,
        warnings=[],
        snapshot_sha256=None,
    )
    return replace(report, warnings=warnings_of(report))

"""Is this data good enough for a night? Refusals say what is wrong and what to write; smaller things are warnings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from configs.schema.data import DataConfig
from training.data.reasons import ADVICE, Dropped, Reason
from training.data.report import ValidationReport
from training.errors import DataError

TOP_REASONS = 3
# A chosen side that is longer this often teaches a reward model to like length.
LENGTH_BIAS = 0.65
FEW_EVALUATION_PROMPTS = 64

_DROPPED = {
    Dropped.EXACT_DUPLICATE: "exact duplicates of earlier rows were left out",
    Dropped.NEAR_DUPLICATE: "near duplicates of earlier rows were left out",
    Dropped.EVALUATION_OVERLAP: "training rows were left out because their prompt is an evaluation prompt",
    Dropped.EVALUATION_OVERLAP_NEAR: "training rows were left out because their prompt is nearly an evaluation prompt",
    Dropped.OVER_MAX_ROWS: "rows were left out by max_rows or max_validation_rows",
}


def judge_quarantine(report: ValidationReport, config: DataConfig, quarantine: Path) -> None:
    """Raise DataError when every row, or more than data.max_quarantine of them, is bad; names the top reasons."""
    bad, read = report.rows_quarantined, report.rows_read
    if bad == read:
        raise DataError(f"all {read} rows were refused: {top_reasons(report)}", f"{_advice(report)}; see {quarantine}")
    if bad > config.max_quarantine * read:
        raise DataError(
            f"{bad} of {read} rows ({bad / read:.1%}) were refused, more than data.max_quarantine "
            f"{config.max_quarantine:.1%}: {top_reasons(report)}",
            f"{_advice(report)}; all are in {quarantine}. If this share is normal, raise data.max_quarantine",
        )


def judge_splits(report: ValidationReport, config: DataConfig) -> None:
    """Raise DataError when a split that the night needs is empty or too small."""
    train, validation, evaluation = (report.splits.get(name, 0) for name in ("train", "validation", "evaluation"))
    if evaluation == 0:
        raise DataError(
            f"no prompt of {report.rows_read} rows fell to evaluation "
            f"(data.evaluation_fraction {config.evaluation_fraction:g})",
            "raise data.evaluation_fraction, or bring more prompts",
        )
    if validation == 0 and config.validation_fraction > 0:
        raise DataError(
            f"no prompt of {report.rows_read} rows fell to validation "
            f"(data.validation_fraction {config.validation_fraction:g})",
            "raise data.validation_fraction, or bring more prompts",
        )
    if train < config.min_rows:
        raise DataError(
            f"{train} training rows are left, fewer than data.min_rows {config.min_rows}"
            + (f"; left out: {_counts(report.dropped)}" if report.dropped else ""),
            "bring more data, or lower data.min_rows",
        )


def warnings_of(report: ValidationReport) -> list[str]:
    """Sentences about what a person may want to know although the night goes on."""
    found = [f"{count} {_DROPPED[Dropped(reason)]}" for reason, count in report.dropped.items()]
    if report.rows_quarantined:
        found.append(f"{report.rows_quarantined} rows were quarantined: {top_reasons(report)}")
    share = report.longer_chosen_share
    if share is not None and not 1 - LENGTH_BIAS <= share <= LENGTH_BIAS:
        found.append(f"the chosen side is the longer one in {share:.0%} of the pairs: a reward model may learn length")
    evaluation = report.splits.get("evaluation", 0)
    if 0 < evaluation < FEW_EVALUATION_PROMPTS:
        found.append(f"only {evaluation} evaluation prompts: intervals will be wide and gates undecided")
    return found


def top_reasons(report: ValidationReport) -> str:
    """The commonest reasons with counts and a place each."""
    top = list(report.quarantined.items())[:TOP_REASONS]
    return ", ".join(f"{reason} ({count}, e.g. {report.examples[reason]})" for reason, count in top)


def _advice(report: ValidationReport) -> str:
    return ADVICE[Reason(next(iter(report.quarantined)))]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())

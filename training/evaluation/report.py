"""The evaluation report: built from per-prompt values, written and read as strict JSON, refused when damaged.

Example:
    builder = MetricBuilder(seed=7, confidence=gates.confidence_levels, slices=slice_members(category=categories))
    report = EvaluationReport(night="2024-05-01", seed=7, ..., metrics=(builder.mean("reward", new, old, start),))
    write_report(directory / "report.json", report)
"""

from __future__ import annotations

from pathlib import Path

from training.evaluation.metric_builder import MetricBuilder, RatioValues, build_metric, exact_metric
from training.evaluation.prompt_slices import length_buckets, slice_members
from training.evaluation.records import read_record, write_record
from training.evaluation.report_records import (
    Estimate,
    EvaluationReport,
    Interval,
    Measurement,
    MetricReport,
    ModelDigest,
    PromptOverlap,
    SampleAnswer,
    SliceMeasurement,
)

__all__ = [
    "Estimate",
    "EvaluationReport",
    "Interval",
    "Measurement",
    "MetricBuilder",
    "MetricReport",
    "ModelDigest",
    "PromptOverlap",
    "RatioValues",
    "SampleAnswer",
    "SliceMeasurement",
    "build_metric",
    "exact_metric",
    "length_buckets",
    "read_report",
    "slice_members",
    "write_report",
]


def write_report(path: Path, report: EvaluationReport) -> None:
    """Write report.json atomically. Raises GateError where the disk refuses."""
    write_record(path, report)


def read_report(path: Path) -> EvaluationReport:
    """Read report.json. Raises GateError naming the file and the key when it is missing, damaged or of another kind."""
    return read_record(path, EvaluationReport)

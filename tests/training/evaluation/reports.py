"""An evaluation report around metrics that a test has made."""

from __future__ import annotations

from collections.abc import Iterable

from training.evaluation.report import EvaluationReport, MetricReport, ModelDigest


def report_of(metrics: Iterable[MetricReport], has_champion: bool = True, prompt_count: int = 200) -> EvaluationReport:
    """All that is not a metric is the same in every report."""
    return EvaluationReport(
        night="night-1",
        seed=1,
        prompt_set_digest="p",
        prompt_count=prompt_count,
        challenger=ModelDigest(name="new", sha256="aa"),
        champion=ModelDigest(name="old", sha256="bb") if has_champion else None,
        reference=ModelDigest(name="start", sha256="cc"),
        metrics=tuple(metrics),
    )

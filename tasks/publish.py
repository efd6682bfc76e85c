"""What a judged night shows in MLflow, made from files on disk: so it can be done late, and again."""

from __future__ import annotations

from pathlib import Path

from tasks.judging import FOLDER, MARKDOWN
from tasks.night_work import NightWork
from tasks.run_tags import NOTE
from tasks.summary import NightSummary
from tasks.tracking import DatasetRef
from training.contract import FileRef
from training.data.snapshot import open_snapshot
from training.evaluation.report import EvaluationReport

SUMMARY = "summary.md"
_NOTE_CHARACTERS = 60_000


def publish_validation(night: NightWork) -> None:
    """The snapshot as the night's data set; the validation report and Data Docs as artifacts."""
    result = night.results["validate"]
    snapshot = result.outputs.get("snapshot")
    if snapshot is not None:
        night.tracker.attempt("the data set", lambda: night.tracker.run.log_datasets([_dataset(snapshot)]))
    for role, folder in (("report", "validation"), ("report_markdown", "validation"), ("data_docs", "data_docs")):
        if role in result.outputs:
            _artifact(night, Path(result.outputs[role].path), folder, "validate")


def publish_judgement(night: NightWork, report: EvaluationReport) -> None:
    """The report, the decision, and the numbers that the compare page shows."""
    numbers: dict[str, float | None] = {}
    for metric in report.metrics:
        numbers[metric.name] = metric.overall.challenger.value
        if metric.overall.reference is not None:
            numbers[f"{metric.name}.reference"] = metric.overall.reference.value
        if metric.overall.champion is not None:
            numbers[f"{metric.name}.champion"] = metric.overall.champion.value
    night.tracker.attempt("the night's figures", lambda: night.tracker.run.log_metrics(numbers))
    _artifact(night, night.folder / FOLDER, "gate", None)
    if night.materials.report is not None:
        _artifact(night, Path(night.materials.report.path), "evaluation", None)


def publish_summary(night: NightWork, summary: NightSummary) -> None:
    """The page, as the run's note and as a file. The gate's note, where there is one, comes first."""
    markdown = summary.markdown()
    file = night.folder / SUMMARY
    file.write_text(markdown, encoding="utf-8")
    decision = night.folder / FOLDER / MARKDOWN
    note = (decision.read_text(encoding="utf-8") + "\n" if decision.is_file() else "") + markdown
    tags = {NOTE: note[:_NOTE_CHARACTERS], "nightjar.verdict": night.state.verdict or night.state.status}
    night.tracker.attempt("the note", lambda: night.tracker.run.tag(tags))
    _artifact(night, file, "summary", None)


def _artifact(night: NightWork, path: Path, folder: str, stage: str | None) -> None:
    night.tracker.attempt(f"artifact {folder}", lambda: night.tracker.run.log_artifact(path, folder, stage))


def _dataset(snapshot: FileRef) -> DatasetRef:
    ref = open_snapshot(Path(snapshot.path))
    return DatasetRef("preferences", ref.uri, ref.sha256, ref.num_rows)

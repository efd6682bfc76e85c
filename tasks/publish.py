"""What a judged night shows in MLflow, made from files on disk: so it can be done late, and again."""

from __future__ import annotations

from pathlib import Path

from tasks.act_runs import publish_acts
from tasks.judging import FOLDER, tell_outcome
from tasks.night_page import DESCRIPTION_CHARACTERS, SUMMARY, fit_note, night_markdown, version_markdown, with_rollback
from tasks.night_work import NightWork
from tasks.review import ReviewFiles, answers_table, night_figures
from tasks.summary import NightSummary
from tasks.tracking import DatasetRef
from training.contract import METRICS, FileRef
from training.data.snapshot import open_snapshot
from training.evaluation.report import EvaluationReport

VALIDATION, DATA_DOCS = "validation", "data_docs"
"""Folders of the validate stage, and of its run's artifacts."""


def publish_validation(night: NightWork) -> None:
    """The snapshot as the night's data set; the validation report and Data Docs as artifacts."""
    result = night.results["validate"]
    snapshot = result.outputs.get("snapshot")
    if snapshot is not None:
        night.tracker.attempt("the data set", lambda: night.tracker.run.log_datasets([_dataset(snapshot)]))
    for role, folder in (("report", VALIDATION), ("report_markdown", VALIDATION), ("data_docs", DATA_DOCS)):
        if role in result.outputs:
            _artifact(night, Path(result.outputs[role].path), folder, "validate")


def publish_failed_validation(night: NightWork) -> None:
    """What a validation that refused its data has written before: the report and Data Docs say which rows and why."""
    left = night.directory("validate") / VALIDATION
    for file in sorted(left.glob("report*")):
        _artifact(night, file, VALIDATION, "validate")
    if (left / DATA_DOCS).is_dir():
        _artifact(night, left / DATA_DOCS, DATA_DOCS, "validate")


def publish_judgement(night: NightWork, report: EvaluationReport) -> None:
    """The report, the decision and what became of it, the numbers that the compare page shows, pictures, answers."""
    run = night.tracker.run
    tell_outcome(night.book, night.state)
    publish_acts(night)
    night.tracker.attempt("the night's figures", lambda: run.log_metrics(_numbers(report)))
    _artifact(night, night.folder / FOLDER, "gate", None)
    if night.materials.report is not None:
        _artifact(night, Path(night.materials.report.path), "evaluation", None)
    if report.samples:
        night.tracker.attempt("the answers", lambda: run.log_answers(answers_table(report.samples)))
    night.tracker.attempt("the pictures", lambda: run.log_figures(night_figures(_review_files(night))))


def _numbers(report: EvaluationReport) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    for metric in report.metrics:
        numbers[metric.name] = metric.overall.challenger.value
        for name, estimate in (("reference", metric.overall.reference), ("champion", metric.overall.champion)):
            if estimate is not None:
                numbers[f"{metric.name}.{name}"] = estimate.value
    return numbers


def _review_files(night: NightWork) -> ReviewFiles:
    ppo, teacher = night.state.stages.get("ppo"), night.results.get("reward")
    limits = [rule.threshold for rule in night.config.guards.rules if rule.metric == "kl_ref" and not rule.relative_to]
    answers = night.materials.answers
    return ReviewFiles(
        ppo_metrics=Path(ppo.directory) / METRICS if ppo is not None else None,
        calibration=Path(teacher.outputs["calibration"].path) if teacher and "calibration" in teacher.outputs else None,
        answers=Path(answers.path) if answers is not None else None,
        kl_limit=max((limit for limit in limits if limit is not None), default=None),
    )


def publish_summary(night: NightWork, summary: NightSummary) -> None:
    """The page as the run's note (with the pictures that the run has by now) and as a file; its gist on the version.

    MLflow shows pictures in a note, and their addresses in a file.
    """
    run, page = night.tracker.run, night_markdown(summary)
    (night.folder / SUMMARY).write_text(page, encoding="utf-8")
    night.tracker.attempt("the note", lambda: run.note(night_markdown(summary, run.pictures()), SUMMARY, page))
    version, told = night.state.version, fit_note(version_markdown(summary), SUMMARY, DESCRIPTION_CHARACTERS)
    if version is not None:
        night.tracker.attempt("the version's description", lambda: _describe(night, version, told))
    tags = {"nightjar.verdict": night.state.verdict or night.state.status}
    night.tracker.attempt("the verdict", lambda: run.tag(tags))


def _describe(night: NightWork, version: str, told: str) -> None:
    """Told late, it may come after a rollback, which stays on top."""
    registry = night.site.registry
    registry.describe(version, with_rollback(told, registry.version(version).tags))


def _artifact(night: NightWork, path: Path, folder: str, stage: str | None) -> None:
    run = night.tracker.run
    night.tracker.attempt(f"artifact {folder}", lambda: run.log_artifact(path, folder, stage), uploads=True)


def _dataset(snapshot: FileRef) -> DatasetRef:
    ref = open_snapshot(Path(snapshot.path))
    return DatasetRef("preferences", ref.uri, ref.sha256, ref.num_rows)

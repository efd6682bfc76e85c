"""The acts of a night as Prefect tasks: names, retries, and nothing else. None is cached: each acts on the world."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import State, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun

from flows.handover import run_where_it_belongs
from tasks.champion_change import promote_version, register_version
from tasks.judging import FOLDER, judge
from tasks.launch import StageRun
from tasks.launch_plan import LaunchPlan
from tasks.night_page import night_markdown
from tasks.night_work import NightWork
from tasks.promotion import Force, Promotion
from tasks.reconcile import Reconciled, reconcile
from tasks.registry_errors import LockHeld, TrackingUnavailable
from tasks.site import Site
from tasks.summary import NightSummary

if TYPE_CHECKING:
    from tasks.judging import EvaluationReport, GateDecision
    from tasks.stages import StageSpec

ACT: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "log_prints": False}
REGISTRY_RETRIES: dict[str, Any] = {"retries": 3, "retry_delay_seconds": [5, 20, 60]}


def is_passing(task: Any, run: TaskRun, state: State[Any]) -> bool:
    """Retry only what waiting can mend: a server that is away, a lock that is held. A refusal is an answer."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, TrackingUnavailable | LockHeld)


@task(name="reconcile", task_run_name="reconcile", retry_condition_fn=is_passing, **REGISTRY_RETRIES, **ACT)
def reconcile_task(site: Site) -> Reconciled:
    """Close what dead processes left open."""
    return reconcile(site)


@task(name="stage", task_run_name="{stage}", **ACT)
def stage_task(stage: str, spec: StageSpec, directory: str, plan: LaunchPlan, night: NightWork) -> StageRun:
    """One stage, here or on the GPU pool. Whoever runs it retries a dead child from its checkpoint; no retry here."""
    with night.tracker.following(stage, Path(directory)):
        return run_where_it_belongs(spec, Path(directory), plan, night.config.runtime, night.ready)


@task(name="gate", task_run_name="gate", **ACT)
def gate_task(night: NightWork, report: EvaluationReport) -> GateDecision:
    """The verdict, from the report and the rules alone."""
    return judge(report, night.config, night.state.champion is not None, night.folder / FOLDER)


@task(name="register", task_run_name="register", retry_condition_fn=is_passing, **REGISTRY_RETRIES, **ACT)
def register_task(night: NightWork, decision: GateDecision) -> str:
    """The policy as a verified version in the registry."""
    return register_version(night, decision)


@task(name="promote", task_run_name="promote", retry_condition_fn=is_passing, **REGISTRY_RETRIES, **ACT)
def promote_task(night: NightWork, version: str, force: Force | None) -> Promotion:
    """The version as champion, or everything as it was."""
    return promote_version(night, version, force)


@task(name="report", task_run_name="report", **ACT)
def report_task(summary: NightSummary, run: str | None) -> None:
    """The night's page as Prefect artifacts: to read, and as the one table that the terminal shows.

    `run`: the address of the night's run in MLflow, which has the curves; null where no server shows it.
    """
    key = summary.night.lower().replace("_", "-").replace(".", "-")
    page = night_markdown(summary, run=run)
    # The description of an artifact is what its card on the flow run's page says.
    create_markdown_artifact(page, key=f"{key}-summary", description=summary.headline)
    create_table_artifact(summary.rows(), key=f"{key}-table", description=f"Night {summary.night}, as one table")

"""One night, told once: lock, check, reconcile, open, stages, gate, register, promote, report."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import State, flow
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, Failed

from configs.errors import NightjarError
from configs.schema import NightConfig, load_config
from flows.flow_log import FlowLog
from flows.handover import is_handed_over
from flows.missed_nights import is_too_old, late_since
from flows.night_tasks import gate_task, promote_task, reconcile_task, register_task, report_task, stage_task
from flows.only_shown import only_shown
from flows.request import NightRequest
from flows.signs_of_life import shown_at_work
from flows.stopping import leave_if_embedded
from tasks.act_runs import GATE, PROMOTE, REGISTER, acting
from tasks.admission import admit_night
from tasks.catch_up import catch_up
from tasks.enough_samples import check_samples
from tasks.finish_late import finish_late
from tasks.headline import headline
from tasks.home import home_of
from tasks.judging import read_report, stored_decision
from tasks.night import NothingToDo, Opened, caught_up_since, open_night, same_snapshot_before
from tasks.night_lock import ANOTHER_RUNS, NightAtWork, only_night
from tasks.night_source import source_of
from tasks.night_state import NightBook
from tasks.night_tracking import NightTracker
from tasks.night_work import NightWork
from tasks.progress import listener, listening
from tasks.promotion import Force
from tasks.publish import publish_failed_validation, publish_judgement, publish_summary, publish_validation
from tasks.registry_errors import BannedVersion
from tasks.run_lease import run_lease
from tasks.site import Site
from tasks.summary import summarise
from training.disk import full_disk_in_words

if TYPE_CHECKING:
    from tasks.judging import EvaluationReport, GateDecision
    from tasks.launch import StageRun
    from tasks.stages import StageSpec

SKIPPED, REJECTED, UNDECIDED = "Skipped", "Rejected", "Undecided"


def _run_name() -> str:
    request = flow_run.parameters.get("request")
    config = request.config if isinstance(request, NightRequest) else dict(request or {}).get("config", "night")
    chain = deployment.name or Path(config).stem  # a deployment has the chain's name, its config perhaps another
    return f"{chain} {time.strftime('%Y-%m-%d %H:%M')}"


@flow(name="nightly", flow_run_name=_run_name, persist_result=False, log_prints=False)
def nightly(request: NightRequest) -> State[Any]:
    """Run, continue or skip a night.

    Ends Completed when a version was promoted, `Skipped` (completed) when there was nothing to do, and in a failed
    state that a person notices when the gate refused (`Rejected`, `Undecided`) or something broke; the champion then
    is the one from before.
    """
    try:
        config = load_config(request.config, request.overrides)
        due = None if request.again else late_since()
        if due is not None and is_too_old(due, request.stale_after_hours):
            return _skipped(f"this start was due over {request.stale_after_hours:g} hours ago; the next one catches up")
        with listening(FlowLog(listener())):
            return _in_turn(request, config, home_of(config), due)
    except NightjarError as error:
        return Failed(message=str(error))
    except BaseException as error:
        leave_if_embedded(error)
        raise


def _in_turn(request: NightRequest, config: NightConfig, home: Path, due: float | None) -> State[Any]:
    """The night, when it is this one's turn; skipped when another start of the chain has it in hand or has done it."""
    with ExitStack() as alone:
        alone.enter_context(shown_at_work(home, make_home=True))
        try:
            wait = config.runtime.turn_wait_minutes * 60.0
            alone.enter_context(only_night(home, config.name, wait, listener().note))
        except NightAtWork as busy:
            return _skipped(f"{ANOTHER_RUNS}: {busy.message}")
        done = None if due is None else caught_up_since(NightBook(home), config.name, due, time.time())
        if done is not None:
            return _skipped(f"this start was due before night {done.night} began; night {done.night} has caught up")
        with full_disk_in_words(home):
            return _run(request, config, home)


def _run(request: NightRequest, config: NightConfig, home: Path) -> State[Any]:
    # 1. Everything that can be refused is refused before any compute.
    site = admit_night(config, home, request.force)
    # 2. What dead processes left open is closed.
    for sentence in (*finish_late(site).problems, *catch_up(NightBook(home))):
        listener().note(sentence)
    reconciled = reconcile_task(site)
    for sentence in (*reconciled.settled, *reconciled.problems, *reconciled.busy, *reconciled.moved):
        listener().note(sentence)
    # 3. Go on with a night that broke off, skip, or begin a new one.
    book = NightBook(home)
    opened = open_night(book, config, source_of(config, home), again=request.again)
    if isinstance(opened, NothingToDo):
        return _skipped(opened.reason)
    return _run_opened(request, config, book, site, opened)


def _run_opened(request: NightRequest, config: NightConfig, book: NightBook, site: Site, opened: Opened) -> State[Any]:
    state = book.change(opened.state, flow_run_id=flow_run.id or None)
    book.save_config(state.night, config)
    listener().note(f"night {state.night} " + ("goes on where it stopped" if opened.continued else "begins"))
    with run_lease(book.home, state.night):
        tracker = NightTracker.open(site, state.night, config)
        night = NightWork(config, book, site, tracker, state)
        try:
            with full_disk_in_words(book.home):
                night.note(mlflow_run_id=tracker.run.run_id)
                return _work(request, night)
        except NightjarError as error:
            _close_failed(night, error)
            raise
        except BaseException:
            with only_shown("the end of a killed night"):
                night.finish("KILLED")  # the state on disk stays `running`: repeating the command goes on
            raise
        finally:
            night.ready.end()


def _close_failed(night: NightWork, error: NightjarError) -> None:
    """Note, show and end a failed night. Nothing in here may take the place of the error that is being told."""
    with only_shown("the state of a failed night"):
        night.note(status="failed", ended=time.time(), reason=error.message)
    with only_shown("the page of a failed night"):
        _report(night, *_judged_so_far(night))
    with only_shown("the end of a failed night"):
        night.finish("FAILED")


def _judged_so_far(night: NightWork) -> tuple[EvaluationReport | None, GateDecision | None]:
    """What a night that fails behind its gate has to show all the same."""
    if night.state.verdict is None or "evaluate" not in night.results:
        return None, None
    report = read_report(Path(night.results["evaluate"].output("report").path))
    publish_judgement(night, report)
    return report, stored_decision(night.book, night.state.night)


def _work(request: NightRequest, night: NightWork) -> State[Any]:
    # 4. The champion is frozen: the whole night starts from it and is judged against it.
    night.freeze()
    # 5. and 6. The stages, the gate, the registry, the champion.
    with ExitStack() as serving:
        same = _run_stages(request, night, serving)
        if same is not None:
            return _skipped_night(night, same)
        report = read_report(Path(night.results["evaluate"].output("report").path))
        decision, reason = _judge(request, night, report)
    night.note(reason=reason)
    with only_shown("the judgement in MLflow"):
        publish_judgement(night, report)
    # 7. The page that a person reads. The champion has moved or stayed by now: no display changes how the night ended.
    night.note(status="finished", ended=time.time())
    _report(night, report, decision)
    with only_shown("the night's end in MLflow"):
        night.finish("FINISHED")
    return _final_state(night, decision)


def _run_stages(request: NightRequest, night: NightWork, serving: ExitStack) -> str | None:
    """Each a child process; a result that is there already is reused. Returns why the night need not go on.

    While the last one computes, the process that registers and promotes loads what it needs; it ends with `serving`.
    """
    stages = night.stages()
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        spec = night.spec(stage)
        if following is None:
            serving.enter_context(night.warm_serving())
        elif not is_handed_over(following):
            night.prepare(following, unless_done=spec)
        night.took(stage, _run_stage(night, stage, spec))
        if stage == "validate":
            same = _after_validation(request, night)
            if same is not None:
                return same
    return None


def _judge(request: NightRequest, night: NightWork, report: EvaluationReport) -> tuple[GateDecision, str | None]:
    """Gate, registration, promotion. Returns the decision, and why a version that passed was not promoted."""
    with acting(night, GATE):
        decision = gate_task(night, report)
    night.note(verdict=decision.verdict)
    with acting(night, REGISTER):
        version = register_task(night, decision)
    return decision, _promote(request, night, decision, version)


def _run_stage(night: NightWork, stage: str, spec: StageSpec) -> StageRun:
    started = time.monotonic()
    try:
        return stage_task(stage, spec, str(night.directory(stage)), night.plan(stage), night)
    except NightjarError:
        with only_shown(f"the seconds of {stage}"):
            night.lost(stage, time.monotonic() - started)
        if stage == "validate":
            with only_shown("the report of a failed validation"):
                publish_failed_validation(night)
        raise


def _after_validation(request: NightRequest, night: NightWork) -> str | None:
    publish_validation(night)
    snapshot = night.results["validate"].output("snapshot")
    night.note(snapshot_sha256=snapshot.sha256)
    same = None if request.again else same_snapshot_before(night.book, night.state, snapshot.sha256)
    if same is not None:
        return f"the new files hold the same rows as night {same.night}"
    if not request.force:
        check_samples(night.config, Path(snapshot.path), has_champion=night.state.champion is not None)
    return None


def _promote(request: NightRequest, night: NightWork, decision: GateDecision, version: str) -> str | None:
    """Promote what passed or what a person forces. Returns why a version that passed was not promoted."""
    force = Force(request.who, request.why) if request.force else None
    if not decision.promote and force is None:
        return None
    try:
        with acting(night, PROMOTE):
            promote_task(night, version, force)
    except BannedVersion as banned:
        night.note(verdict="FAIL")
        return banned.message
    return None


def _report(night: NightWork, report: EvaluationReport | None, decision: GateDecision | None) -> None:
    """The page in MLflow, on the terminal and in Prefect, each by itself."""
    with only_shown("the night's page"):
        summary = summarise(night.state, night.config, night.results, report, decision)
        with only_shown("the page in MLflow"):
            publish_summary(night, summary)
        with only_shown("the page on the terminal"):
            listener().summary(summary)
        with only_shown("the page in Prefect"):
            report_task(summary, night.tracker.run.url())


def _final_state(night: NightWork, decision: GateDecision) -> State[Any]:
    state = night.state
    told = headline(state, decision)
    if state.promoted:
        return Completed(message=told)
    told += f" (version {state.version} is registered as challenger, the champion stays)"
    return Failed(name=UNDECIDED if decision.verdict == "INCONCLUSIVE" else REJECTED, message=told)


def _skipped_night(night: NightWork, reason: str) -> State[Any]:
    night.note(status="skipped", ended=time.time(), reason=reason)
    night.finish("FINISHED")
    return _skipped(reason)


def _skipped(reason: str) -> State[Any]:
    listener().note(f"skipped: {reason}")
    return Completed(name=SKIPPED, message=reason)

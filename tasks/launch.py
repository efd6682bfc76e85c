"""Running a stage as a child process: reuse, resume, bounded waits, retries of what died, and no process left behind.

Success is only a valid result.json. An exit code decides merely whether a failure is the user's to mend (2) or worth
another attempt (anything else).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.launch_plan import LaunchPlan
from tasks.lease import renewed_lease
from tasks.process_tree import end_processes, how_it_ended, start_child
from tasks.progress import MetricsTail, Progress, listener
from tasks.ready_child import ReadyChildren
from tasks.result_index import find_result, remember_result
from training.contract import LOG, SPEC, StageResult, StageSpec, read_spec, valid_result, write_spec
from training.errors import ContractError, StageError

USER_ERROR = 2
_POLL_SECONDS = 0.2
_ERROR_LINE = re.compile(r"ERROR nightjar: (?:[A-Za-z]+: )?(.*)")
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d[ T]\d\d:")
_TORCHRUN_LINE = re.compile(r"^[WEI]\d{4} ")


@dataclass(frozen=True)
class StageRun:
    """A stage that is done: its manifest, where it lies, and how it came about."""

    result: StageResult
    directory: Path
    reused: bool
    attempts: int
    seconds: float


class _ChildDied(Exception):
    """The child ended without a result and without saying that the user must act."""


def run_stage(
    spec: StageSpec,
    directory: Path,
    plan: LaunchPlan,
    progress: Progress | None = None,
    ready: ReadyChildren | None = None,
) -> StageRun:
    """Bring `spec` to a valid result in `directory`, or find it already made, also on an earlier night.

    A child that `ready` holds for the directory makes the first attempt.

    Raises StageError with the child's own last words when the user must act, when time is up, and when the process
    died more often than the plan's retries. Whatever ends this call, no process of the stage is left.
    """
    progress, ready = progress or listener(), ready or ReadyChildren()
    found = find_result(Path(spec.home), directory, spec.key)
    if found is not None:
        ready.drop(directory)
        progress.stage_ended(spec.stage, "reused", 0.0)
        return StageRun(found.result, found.directory, reused=True, attempts=0, seconds=0.0)
    started = time.monotonic()
    try:
        if not ready.holds(directory):
            end_processes(directory)  # of a parent that was killed and whose children have not noticed yet
        _make_ready(spec, directory)
        result, attempts = _attempt_until_done(spec, directory, plan, progress, ready)
    except BaseException:
        ready.drop(directory)
        progress.stage_ended(spec.stage, "failed", time.monotonic() - started)
        raise
    remember_result(Path(spec.home), directory, result)
    seconds = time.monotonic() - started
    progress.stage_ended(spec.stage, "done", seconds)
    return StageRun(result, directory, reused=False, attempts=attempts, seconds=seconds)


def _make_ready(spec: StageSpec, directory: Path) -> None:
    """Keep a half-finished directory of the same key to resume from; move one of another key aside."""
    if (directory / SPEC).exists() and _key_of(directory) != spec.key:
        number = 1 + sum(1 for _ in directory.parent.glob(f"{directory.name}.superseded-*"))
        directory.rename(directory.with_name(f"{directory.name}.superseded-{number}"))
    write_spec(directory, spec)


def _key_of(directory: Path) -> str | None:
    try:
        return read_spec(directory).key
    except ContractError:
        return None


def _attempt_until_done(
    spec: StageSpec, directory: Path, plan: LaunchPlan, progress: Progress, ready: ReadyChildren
) -> tuple[StageResult, int]:
    deadline = time.monotonic() + plan.timeout
    for attempt in range(1, plan.retries + 2):
        progress.stage_started(spec.stage, attempt)
        try:
            return _attempt(spec, directory, plan, progress, deadline, ready), attempt
        except _ChildDied as death:
            if attempt > plan.retries:
                raise StageError(
                    f"stage {spec.stage} {death}, {attempt} time(s); its output is in {directory / LOG}",
                    "read the log; repeating the command goes on from the last checkpoint",
                ) from None
            progress.stage_event(spec.stage, "died", {"attempt": attempt, "how": str(death)})
            time.sleep(plan.retry_pause * attempt)
    raise AssertionError("the loop above returns or raises")


def _attempt(
    spec: StageSpec, directory: Path, plan: LaunchPlan, progress: Progress, deadline: float, ready: ReadyChildren
) -> StageResult:
    log = directory / LOG
    log_start = log.stat().st_size if log.exists() else 0
    tail = MetricsTail(directory, spec.stage, progress)
    with renewed_lease(directory, plan.lease):
        child = ready.take(directory, plan) or start_child(
            plan.command(spec.stage, directory), directory, log, plan.environment(spec.stage)
        )
        try:
            while child.poll() is None:
                if time.monotonic() > deadline:
                    raise StageError(
                        f"stage {spec.stage} took longer than {plan.timeout / 60:g} minutes and was ended",
                        "raise runtime.stage_timeout_minutes; repeating the command goes on from the last checkpoint",
                    )
                tail.poll()
                time.sleep(_POLL_SECONDS)
        finally:
            # Also after a good end: a rank or a data worker may have outlived its launcher.
            end_processes(directory)
            child.wait()
            tail.poll()
    result = valid_result(directory, spec.key)
    if result is not None:
        return result
    words = last_words(log, log_start)
    # torchrun reports its own exit code, so there only the words tell.
    if child.returncode == USER_ERROR or (plan.is_distributed and words.is_user_error):
        # A full disk takes the child's words with it.
        raise StageError(f"stage {spec.stage}: {words.text or 'ended without a word; look whether the disk is full'}")
    raise _ChildDied(f"died ({how_it_ended(child.returncode)}{': ' + words.text if words.text else ''})")


@dataclass(frozen=True)
class LastWords:
    """The end of a child's log: an error said in words for the user, or the last line of a crash."""

    text: str
    is_user_error: bool


def last_words(log: Path, start: int = 0) -> LastWords:
    """What the child said last after byte `start` of its log."""
    with log.open("rb") as stream:
        stream.seek(start)
        lines = stream.read().decode("utf-8", errors="replace").splitlines()
    for number in range(len(lines) - 1, -1, -1):
        match = _ERROR_LINE.search(lines[number])
        if match:
            return LastWords("\n".join([match.group(1), *_continuation(lines[number + 1 :])]), is_user_error=True)
    said = [line.strip() for line in lines if line.strip() and not _TORCHRUN_LINE.match(line)]
    return LastWords(said[-1][:500] if said else "", is_user_error=False)


def _continuation(lines: list[str]) -> list[str]:
    """The rest of a message of several lines: up to the next log line."""
    rest = []
    for line in lines:
        if not line.strip() or _LOG_LINE.match(line) or _TORCHRUN_LINE.match(line):
            break
        rest.append(line)
    return rest

"""`nightjar run` and `nightjar watch`: a flow in this process, under a display, ended cleanly by any signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from configs.errors import ConfigError, NightjarError
from configs.schema import load_config
from flows.console import lines_for
from flows.embedded import prepare_prefect
from flows.exit_codes import BUSY, DEFECT, DONE, REJECTED, USER
from flows.request import NightRequest
from flows.server_gone import ServerGone, is_server_gone, told_by_record
from flows.stopping import ending_on_signals
from flows.user_name import user_name
from tasks.admission import admit_night, admit_watch
from tasks.home import home_of
from tasks.measure import ANOTHER_MEASURES
from tasks.night_lock import ANOTHER_RUNS, NightAtWork, check_alone, only_night
from tasks.progress import listener, listening

if TYPE_CHECKING:
    from prefect import State

_REFUSALS = ("Rejected", "Undecided", "Breached")


def run_night(config: str, overrides: Sequence[str], *, again: bool, force: bool, why: str, plain: bool) -> int:
    """Run the flow and return the exit code. Raises NightjarError when the request or the config is wrong."""
    if force and not why.strip():
        raise ConfigError("--force promotes against the gate, so it needs a reason", "add --why TEXT; it is recorded")
    request = NightRequest(
        config=config, overrides=tuple(overrides), again=again, force=force, who=user_name() if force else "", why=why
    )
    loaded = load_config(config, overrides)
    home = home_of(loaded)

    def check() -> None:
        check_alone(home, loaded.name)
        admit_night(loaded, home, force)
        with only_night(home, loaded.name, loaded.runtime.turn_wait_minutes * 60.0, listener().note):
            pass  # another chain's night is waited for before there is a second temporary server in this home

    def start() -> State[Any]:
        from flows.nightly import nightly

        return nightly(request, return_state=True)

    began = time.time()
    try:
        return _run(home, check, start, plain)
    except NightAtWork as busy:
        return _busy(f"{ANOTHER_RUNS}: {busy.message}")
    except ServerGone as gone:
        return told_by_record(home, loaded.name, began, gone)


def run_watch(home: Path, *, plain: bool, chain: str | None = None, model: str | None = None) -> int:
    """Measure the champion once; the exit code tells whether it kept its limits."""

    def check() -> None:
        admit_watch(home, chain, model)

    def start() -> State[Any]:
        from flows.watch import WatchRequest, watch

        return watch(WatchRequest(home=str(home), chain=chain, model=model), return_state=True)

    return _run(home, check, start, plain)


def _run(home: Path, check: Callable[[], None], start: Callable[[], State[Any]], plain: bool) -> int:
    """What can be refused is refused before Prefect starts its server, which takes many seconds."""
    console = Console()
    with ending_on_signals(), lines_for(console, plain) as lines, listening(lines):
        lines.note("starting")
        check()
        prepare_prefect(home)
        state = _started(start)
    return _tell(console, state)


def _started(start: Callable[[], State[Any]]) -> State[Any]:
    try:
        return start()
    except RuntimeError as error:
        if "ephemeral" not in str(error):
            raise
        raise NightjarError(
            f"Prefect's temporary server did not start: {error}",
            "nothing has run; repeat the command when the machine is less busy, or set PREFECT_API_URL to a server",
        ) from error
    except Exception as error:
        if not is_server_gone(error):
            raise
        raise ServerGone(
            f"the Prefect server does not answer any more ({type(error).__name__})",
            "start it, or unset PREFECT_API_URL, and repeat the command: what is on disk stands",
        ) from error


def _tell(console: Console, state: State[Any]) -> int:
    if state.is_completed():
        # Somebody else has begun since the check above; a scheduled run ends Skipped, people are told.
        is_busy = (state.message or "").startswith((ANOTHER_RUNS, ANOTHER_MEASURES))
        return _busy(state.message or "") if is_busy else DONE
    if state.name in _REFUSALS:
        return REJECTED
    if state.is_crashed():
        Console(stderr=True).print(f"[red]crashed[/] {escape(state.message or '')}", highlight=False)
        return DEFECT
    words = state.message or "the night failed"
    Console(stderr=True).print(f"[red]error[/] {escape(words)}", highlight=False, soft_wrap=True)
    return USER if not _is_defect(state) else DEFECT


def _busy(sentence: str) -> int:
    hint = "wait until it has ended and repeat the command; nothing was computed"
    words = str(NightjarError(sentence, hint))
    Console(stderr=True).print(f"[red]busy[/] {escape(words)}", highlight=False, soft_wrap=True)
    return BUSY


def _is_defect(state: State[Any]) -> bool:
    """Flows return a failed state for what a person can mend; an exception that escaped them is a defect."""
    return isinstance(state.data, BaseException) or "Flow run encountered an exception" in (state.message or "")

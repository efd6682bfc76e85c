"""`nightjar drill`: the steps as a table that grows while the drill runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from tasks.drill import Step, drill

PASSED, FAILED = 0, 1
_STYLES = {"ok": "green", "failed": "red", "not run": "dim"}


def run_drill(on_server: bool, console: Console | None = None) -> int:
    """Run it, show it, and return the exit code: 0 when every step was ok."""
    console = console or Console()
    steps: list[Step] = []
    # Closed here, so that the clean-up is done before an interrupt goes on.
    with _ending_in_order(), _growing_table(console) as show, closing(drill(on_server)) as running:
        for step in running:
            steps.append(step)
            show(steps)
    console.print(_sentence(steps), highlight=False, soft_wrap=True)
    return PASSED if all(step.outcome == "ok" for step in steps) else FAILED


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Ended by SIGTERM it cleans up as well; the default would leave the scratch registry behind."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _growing_table(console: Console) -> Iterator[Callable[[list[Step]], None]]:
    """A function that shows the steps so far; where there is no terminal the whole table comes at the end."""
    with Live(_table([]), console=console, auto_refresh=False) as live:
        yield lambda steps: live.update(_table(steps), refresh=console.is_terminal)
    if not console.is_terminal:
        console.line()


def _table(steps: list[Step]) -> Table:
    table = Table(title="Nightjar drill", title_justify="left", show_lines=False)
    for column in ("step", "what was done", "what was seen"):
        table.add_column(column, overflow="fold")
    table.add_column("seconds", justify="right")
    table.add_column("")
    for step in steps:
        seconds = "" if step.outcome == "not run" else f"{step.seconds:.1f}"
        shown = f"[{_STYLES[step.outcome]}]{step.outcome}[/]"
        table.add_row(escape(step.name), escape(step.done), escape(step.seen), seconds, shown)
    return table


def _sentence(steps: list[Step]) -> str:
    bad = [step.name for step in steps if step.outcome == "failed"]
    seconds = sum(step.seconds for step in steps)
    if not bad:
        return f"[green]drill passed[/]: {len(steps)} steps in {seconds:.0f} s"
    return f"[red]drill failed[/] at {escape(', '.join(bad))}: do not let a night promote before that is understood"

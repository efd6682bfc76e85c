"""What a person sees while a night runs: a live line on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from flows.summary_view import summary_view
from tasks.summary import NightSummary

_MARKS = {"done": "[green]done[/]", "reused": "[cyan]reused[/]", "skipped": "skipped", "failed": "[red]failed[/]"}
_PLAIN_SECONDS = 15.0


class PlainLines:
    """One line a stage, and one every quarter of a minute while it runs. For logs, pipes and CI."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._told = 0.0
        self._pace = Pace()

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def stage_started(self, stage: str, attempt: int) -> None:
        """Say so."""
        self._told = time.monotonic()
        self._pace = Pace()
        self._line(f"{stage}: starts" + (f", attempt {attempt}" if attempt > 1 else ""))

    def stage_moved(self, stage: str, step: int, total: int, shown: Mapping[str, float], doing: str = "") -> None:
        """Say so and how long it may still take, at most every quarter of a minute."""
        left = self._pace.left(step, total, doing, time.monotonic())
        if time.monotonic() - self._told >= _PLAIN_SECONDS:
            self._told = time.monotonic()
            self._line(f"{stage}: {moved_words(step, total, shown, doing)}{left}")

    def stage_event(self, stage: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Say so."""
        self._line(f"{stage}: {event_words(kind, fields)}")

    def stage_ended(self, stage: str, how: str, seconds: float) -> None:
        """Say so."""
        self._line(f"{stage}: {how}" + (f" in {seconds:.1f} s" if how == "done" else ""))

    def note(self, text: str) -> None:
        """Say so."""
        self._line(text)

    def summary(self, summary: NightSummary) -> None:
        """The page."""
        self.console.print(summary_view(summary))

    def _line(self, text: str) -> None:
        self.console.print(escape(f"{time.strftime('%H:%M:%S')}  {text}"), highlight=False, soft_wrap=True)


class Pace:
    """How fast one phase of a stage goes."""

    def __init__(self) -> None:
        self._phase: tuple[str, int] | None = None
        self._first = (0, 0.0)

    def left(self, step: int, total: int, doing: str, now: float) -> str:
        """`, some 40 s left` of this phase at its mean speed so far; nothing before there is one."""
        if self._phase != (doing, total) or step < self._first[0]:
            self._phase, self._first = (doing, total), (step, now)
        steps, seconds = step - self._first[0], now - self._first[1]
        if steps <= 0 or seconds <= 0.0 or step >= total:
            return ""
        rest = (total - step) * seconds / steps
        return f", some {rest:.0f} s left" if rest < 100.0 else f", some {rest / 60:.0f} min left"


class LiveLines(PlainLines):
    """A live bar for the stage at work, with its numbers and the time left; finished stages stay as lines above."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}", style="dim"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> LiveLines:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage_started(self, stage: str, attempt: int) -> None:
        """A fresh bar, without a length until the stage tells one."""
        self._clear()
        self._task = self._bar.add_task(stage, total=None, shown="starting")

    def stage_moved(self, stage: str, step: int, total: int, shown: Mapping[str, float], doing: str = "") -> None:
        """Move the bar."""
        if self._task is not None:
            self._bar.update(self._task, completed=step, total=total, shown=doing or numbers(shown))

    def stage_ended(self, stage: str, how: str, seconds: float) -> None:
        """The bar becomes a line."""
        self._clear()
        took = f"{seconds:8.1f} s" if how in ("done", "failed") else ""
        self.console.print(f"  {stage:<10} {_MARKS.get(how, how)} {took}")

    def summary(self, summary: NightSummary) -> None:
        """The page, below everything."""
        self._clear()
        self._bar.stop()
        super().summary(summary)

    def _clear(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


def lines_for(console: Console, plain: bool = False) -> PlainLines:
    """Live on a terminal, plain elsewhere or when asked."""
    return PlainLines(console) if plain or not console.is_terminal else LiveLines(console)


def numbers(shown: Mapping[str, float]) -> str:
    """`loss 0.53  kl_ref 0.021`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in shown.items())


def moved_words(step: int, total: int, shown: Mapping[str, float], doing: str) -> str:
    """`128/600 loss 0.53` while training, `teacher scores 128/512` in a phase around it."""
    return " ".join(filter(None, (doing, f"{step}/{total}", numbers(shown))))


def event_words(kind: str, fields: Mapping[str, Any]) -> str:
    """An event in one line: its own sentence where it has one."""
    if kind == "died":
        return f"attempt {fields.get('attempt')} {fields.get('how')}; starting again from the last checkpoint"
    if kind == "validating":
        return f"{fields.get('doing')}, {fields.get('rows')} rows"
    told = fields.get("sentence") or fields.get("message")
    if told:
        return f"{kind}: {told}"
    words = ", ".join(f"{name} {_short(value)}" for name, value in fields.items() if name != kind)
    return f"{kind} {fields[kind]}: {words}" if kind in fields else f"{kind} {words}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

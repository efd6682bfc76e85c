"""The night's page for the terminal: one table."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from tasks.guard_lines import GuardLine
from tasks.summary import GateLine, NightSummary

_MOST_GUARD_LINES = 12
_STYLES = {"PASS": "green", "FAIL": "red", "ERROR": "red", "INCONCLUSIVE": "yellow", "SKIPPED": "dim"}


def summary_view(summary: NightSummary) -> Table:
    """Stages with seconds, figures, every gate sentence, guards, the verdict and the version, and what to do next.

    The verdict stands at the end, where a terminal stops scrolling.
    """
    table = Table(title=f"night {escape(summary.night)}", title_justify="left", show_header=False)
    table.add_column("what", overflow="fold", ratio=3)
    table.add_column("told", overflow="fold", ratio=5)
    table.expand = True
    if summary.stages:
        _stages(table, summary)
    if summary.figures:
        _head(table, "Figures", "95 % intervals in brackets")
        for figure in summary.figures:
            table.add_row(figure.name, escape(figure.value))
    if summary.gate:
        _gate(table, summary.gate)
    if summary.guards:
        _guards(table, summary.guards)
    _closing(table, summary)
    return table


def _head(table: Table, name: str, words: str = "") -> None:
    table.add_section()
    table.add_row(f"[bold]{name}[/]", f"[dim]{words}[/]" if words else "")


def _stages(table: Table, summary: NightSummary) -> None:
    _head(table, "Stages", "seconds")
    for line in summary.stages:
        table.add_row(line.stage, f"{line.seconds:>7.1f}  {line.words}")
    table.add_row("whole night", f"{summary.seconds:>7.1f}")


def _gate(table: Table, lines: tuple[GateLine, ...]) -> None:
    _head(table, "Gate", "a sentence a rule")
    for line in lines:
        style, sentence = _STYLES.get(line.verdict, ""), escape(line.sentence)
        table.add_row(escape(line.label), f"[{style}]{sentence}[/]" if style else sentence)


def _guards(table: Table, lines: tuple[GuardLine, ...]) -> None:
    """The last firings; a warning at every step must not push the verdict off the screen."""
    left_out = len(lines) - _MOST_GUARD_LINES
    told = f"the last {_MOST_GUARD_LINES} of {len(lines)}; all are in summary.md"
    _head(table, "Guards", told if left_out > 0 else "")
    for line in lines[-_MOST_GUARD_LINES:]:
        table.add_row(f"step {line.step}, {line.action}", escape(line.sentence))


def _closing(table: Table, summary: NightSummary) -> None:
    table.add_section()
    table.add_row("[bold]Verdict[/]", f"[bold]{escape(summary.headline)}[/]")
    if summary.version:
        table.add_row("[bold]Registered[/]", f"version {summary.version} of {summary.model}, alias {summary.alias}")
    for number, step in enumerate(summary.next_steps):
        table.add_row("[bold]Next[/]" if number == 0 else "", escape(step))

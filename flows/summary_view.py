"""The night's page for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from tasks.guard_lines import GuardLine
from tasks.summary import GateLine, NightSummary

_MOST_GUARD_LINES = 12
_STYLES = {"PASS": "green", "FAIL": "red", "ERROR": "red", "INCONCLUSIVE": "yellow", "SKIPPED": "dim"}


def summary_view(summary: NightSummary) -> RenderableType:
    """Stages with seconds, figures, every gate sentence, the version, and what to do next."""
    parts: list[RenderableType] = []
    if summary.stages:
        parts.append(_stages(summary))
    if summary.figures:
        parts.append(_figures(summary))
    if summary.gate:
        parts.append(_gate(summary.gate))
    if summary.guards:
        parts.append(_guards(summary.guards))
    parts.append(Panel("\n".join(_closing(summary)), title=f"night {summary.night}", title_align="left"))
    return Group(*parts)


def _stages(summary: NightSummary) -> Table:
    table = Table(title="Stages", title_justify="left")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("")
    for line in summary.stages:
        table.add_row(line.stage, f"{line.seconds:.1f}", line.words)
    table.add_section()
    table.add_row("whole night", f"{summary.seconds:.1f}", "")
    return table


def _figures(summary: NightSummary) -> Table:
    table = Table(title="Figures (95 % intervals)", title_justify="left")
    table.add_column("figure")
    table.add_column("value")
    for figure in summary.figures:
        table.add_row(figure.name, escape(figure.value))
    return table


def _gate(lines: tuple[GateLine, ...]) -> Table:
    table = Table(title="Gate", title_justify="left", show_lines=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("in words", overflow="fold")
    for line in lines:
        style = _STYLES.get(line.verdict, "")
        table.add_row(line.label, f"[{style}]{line.verdict}[/]" if style else line.verdict, escape(line.sentence))
    return table


def _guards(lines: tuple[GuardLine, ...]) -> Table:
    """The last firings; a warning at every step must not push the verdict off the screen."""
    left_out = len(lines) - _MOST_GUARD_LINES
    shown = f" (the last {_MOST_GUARD_LINES} of {len(lines)}; all are in summary.md)" if left_out > 0 else ""
    table = Table(title=f"Guards{shown}", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("action", no_wrap=True)
    table.add_column("in words", overflow="fold")
    for line in lines[-_MOST_GUARD_LINES:]:
        table.add_row(str(line.step), line.action, escape(line.sentence))
    return table


def _closing(summary: NightSummary) -> list[str]:
    lines = [f"[bold]{escape(summary.headline)}[/]"]
    if summary.version:
        lines.append(f"registered: version {summary.version} of {summary.model}, alias {summary.alias}")
    return [*lines, "", *(escape(step) for step in summary.next_steps)]

"""`nightjar status`: nights, champion, previous, open problems."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from configs.errors import NightjarError
from tasks.last_config import sites_of
from tasks.night_state import NightBook, NightState
from tasks.site import Site

_STYLES = {"finished": "green", "failed": "red", "running": "yellow", "skipped": "dim"}


def status_view(home: Path, count: int) -> RenderableType:
    """The page. Raises NightjarError when the home has seen no night."""
    sites = sites_of(home)
    book = NightBook(home)
    nights = book.nights()
    lines, problems = [], []
    for site in sites:
        told, open_ones = _registry_lines(site)
        lines += told
        problems += open_ones
    problems += _night_problems(nights)
    problems += [error.message for error in book.unreadable()]
    parts: list[RenderableType] = [f"home {escape(str(home))}", _nights_table(nights[-count:]), *map(escape, lines)]
    parts += [f"[red]open[/] {escape(problem)}" for problem in problems] or ["no open problems"]
    return Group(*parts)


def _night_problems(nights: list[NightState]) -> list[str]:
    newest = {night.name: night for night in nights}
    running = [f"night {n.night} is not done; repeat its command" for n in newest.values() if n.status == "running"]
    owed = [f"night {n.night} still owes MLflow: {', '.join(n.owed)}" for n in nights if n.owed]
    return [*running, *owed]


def _nights_table(nights: list[NightState]) -> Table:
    table = Table()
    for column in ("night", "began", "minutes", "status", "verdict", "version", "in words"):
        table.add_column(column, overflow="fold")
    for night in nights:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(night.started))
        style = _STYLES[night.status]
        version = f"{night.version}{' (promoted)' if night.promoted else ''}" if night.version else ""
        minutes = f"{night.seconds / 60:.1f}" if night.ended else ""
        table.add_row(
            night.night, began, minutes, f"[{style}]{night.status}[/]", night.verdict or "", version,
            escape(night.reason or ""),
        )  # fmt: skip
    return table


def _registry_lines(site: Site) -> tuple[list[str], list[str]]:
    """Champion and previous, and what is open in registry and journal."""
    from tasks.preflight import check_tracking
    from tasks.registry import CHAMPION, PREVIOUS

    try:
        check_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
        champion, previous = site.registry.alias(CHAMPION), site.registry.alias(PREVIOUS)
    except NightjarError as error:
        return [], [error.message]
    lines = [f"{site.model}: champion {_named(champion)}, previous {_named(previous)}"]
    problems = [
        f"{entry.event} of version {entry.candidate or entry.taken_down} was never closed: run `nightjar reconcile`"
        for entry in site.journal.unfinished(site.model)
    ]
    known = site.journal.champions(site.model)
    if known and champion != known[-1]:
        problems.append(f"the journal knows version {known[-1]} as champion, the alias names {_named(champion)}")
    return lines, problems


def _named(version: str | None) -> str:
    return "none" if version is None else f"version {version}"

"""`nightjar status`: nights, champion, previous, open problems. What cannot be read is a problem, and hides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from configs.errors import NightjarError
from tasks.chains import NoNightYet
from tasks.last_config import sites_of
from tasks.night_lock import night_at_work
from tasks.night_state import NightBook, NightState
from tasks.registry_errors import JournalError
from tasks.site import Site
from training.contract import LEASE

_STYLES = {"finished": "green", "failed": "red", "running": "yellow", "skipped": "dim"}


def status_view(home: Path, count: int) -> RenderableType:
    """The page; makes nothing. Raises NightjarError when there is no such home."""
    book = NightBook(home)
    nights, unreadable = book.nights(), book.unreadable()
    lines, problems = [], []
    try:
        sites = sites_of(home)
    except NoNightYet as fresh:
        if not home.is_dir():
            raise
        return Group(escape(str(fresh)), *map(escape, _at_work(home)))
    except NightjarError as error:
        if not (nights or unreadable):
            raise
        sites, problems = [], [str(error)]
    for site in sites:
        told, open_ones = _registry_lines(site)
        lines += told
        problems += open_ones
    at_work = _at_work(home)
    lines += at_work
    problems += _night_problems(nights, bool(at_work))
    problems += map(str, unreadable)
    table = _nights_table(book, nights[-count:])
    parts: list[RenderableType] = [f"home {escape(str(home))}", table, *map(escape, lines)]
    parts += [f"[red]open[/] {escape(problem)}" for problem in problems] or ["no open problems"]
    return Group(*parts)


def _at_work(home: Path) -> list[str]:
    """The process that runs a night on this home right now, if one does."""
    holder = night_at_work(home)
    return [] if holder is None else [f"a night is at work: {holder}"]


def _night_problems(nights: list[NightState], at_work: bool) -> list[str]:
    """`at_work`: then a night that is not done is the one at work, or waits behind it."""
    newest = {night.name: night for night in nights}
    running = [
        f"night {n.night} is not done and nobody is at work on it: `nightjar reconcile`, then start it again"
        for n in newest.values()
        if n.status == "running" and not at_work
    ]
    owed = [f"night {n.night} still owes MLflow: {', '.join(n.owed)}" for n in nights if n.owed]
    return [*running, *owed]


def _nights_table(book: NightBook, nights: list[NightState]) -> Table:
    table = Table()
    for column in ("night", "began", "minutes", "status", "verdict", "version", "in words"):
        table.add_column(column, overflow="fold")
    for night in nights:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(night.started))
        style = _STYLES[night.status]
        version = f"{night.version}{' (promoted)' if night.promoted else ''}" if night.version else ""
        minutes = f"{night.seconds / 60:.1f}" if night.ended or night.status == "running" else ""
        cells = map(escape, (night.verdict or "", version, night.reason or _stage_at_work(book, night)))
        table.add_row(escape(night.night), began, minutes, f"[{style}]{night.status}[/]", *cells)
    return table


def _stage_at_work(book: NightBook, night: NightState) -> str:
    """The stage that has a child right now, or the last one that came to its end; nothing of a night that is over."""
    if night.status != "running":
        return ""
    at_work = sorted(lease.parent.name for lease in book.folder(night.night).glob(f"*/{LEASE}"))
    if at_work:
        return f"{', '.join(at_work)} is at work"
    return f"{list(night.stages)[-1]} is done" if night.stages else ""


def _registry_lines(site: Site) -> tuple[list[str], list[str]]:
    """Champion and previous, and what is open in registry and journal: each is asked by itself."""
    lines, problems = _asked(lambda: [*_champions(site), *_last_rollback(site)])
    unfinished, damaged = _asked(lambda: _unfinished(site))
    problems += [*damaged, *unfinished]
    if lines and not damaged:
        found, failed = _asked(lambda: _disagreements(site))
        problems += [*failed, *found]
    elif not damaged:
        known = site.journal.champions(site.model)
        said = "as the journal says; MLflow cannot be asked"
        lines = [f"{site.model}: champion {_named(version)}, {said}" for version in known[-1:]]
    return lines, problems


def _asked(question: Callable[[], list[str]]) -> tuple[list[str], list[str]]:
    """The answer, and what stood in its way."""
    try:
        return question(), []
    except NightjarError as error:
        return [], [str(error)]


def _champions(site: Site) -> list[str]:
    from tasks.agreement import require_kept_database
    from tasks.preflight import check_existing_tracking
    from tasks.registry import CHAMPION, PREVIOUS

    with suppress(JournalError):  # said by the next question
        require_kept_database(site)
    check_existing_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
    champion, previous = site.registry.alias(CHAMPION), site.registry.alias(PREVIOUS)
    return [f"{site.model}: champion {_named(champion)}, previous {_named(previous)}"]


def _last_rollback(site: Site) -> list[str]:
    """The newest change of champion, where it was a rollback: nobody has promoted anything since."""
    with suppress(JournalError):  # said by the next question
        last = site.journal.standing(site.model).last_change
        if last is not None and last.event == "rolled_back":
            what = f"version {last.taken_down} was rolled back to version {last.restored} at {last.time}"
            return [f"{site.model}: {what} by {last.by or 'nobody named'}: {last.why or 'no reason was given'}"]
    return []


def _unfinished(site: Site) -> list[str]:
    return [
        f"{entry.event} of version {entry.candidate or entry.taken_down} was never closed: run `nightjar reconcile`"
        for entry in site.journal.unfinished(site.model)
    ]


def _disagreements(site: Site) -> list[str]:
    from tasks.agreement import compare, way_out

    found = compare(site)
    lost = [str(NightjarError(sentence, way_out(site))) for sentence in found.lost]
    return [*lost, *found.moved]


def _named(version: str | None) -> str:
    return "none" if version is None else f"version {version}"

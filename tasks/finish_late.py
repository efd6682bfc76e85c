"""Ending the runs of nights that were over while MLflow was away: each in its own store, none in another's way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from configs.credentials import without_credentials
from configs.errors import NightjarError
from tasks.night_state import RUNS, NightBook
from tasks.registry_errors import TrackingUnavailable
from tasks.site import Site
from tasks.tracking import STATE, NightRun


@dataclass
class FinishedLate:
    """Nights whose runs were ended, and a sentence for each that could not be."""

    nights: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def finish_late(site: Site) -> FinishedLate:
    """End what was left open. Called at a start, before reconcile; raises nothing that a later start could mend.

    A run that its store does not know (the database came back from an older backup) is told once. A server that is away
    is asked once and told, and asked again at the next start.
    """
    done, away = FinishedLate(), set[str]()
    for run in _unended(site):
        where = run.site.tracking_uri
        if where in away:
            done.problems.append(_still_open(run, "that MLflow does not answer"))
            continue
        try:
            if run.finish_late():
                done.nights.append(run.night)
            else:
                done.problems.append(f"the run of night {run.night} is not in MLflow at {without_credentials(where)}")
        except TrackingUnavailable as error:
            away.add(where)
            done.problems.append(_still_open(run, error.message))
        except NightjarError as error:
            done.problems.append(_still_open(run, error.message))
    return done


def _unended(site: Site) -> Iterator[NightRun]:
    for file in sorted((site.home / RUNS).glob(f"*/{STATE}")):
        run = NightRun.unended(_site_of_night(site, file.parent.name), file.parent.name)
        if run is not None:
            yield run


def _site_of_night(site: Site, night: str) -> Site:
    """Where the night's own config keeps its runs: chains that share a home need not share an MLflow."""
    try:
        return Site.open(site.home, NightBook(site.home).config(night).registry)
    except NightjarError:
        return site


def _still_open(run: NightRun, why: str) -> str:
    return f"the run of night {run.night} is still open in MLflow: {why}"

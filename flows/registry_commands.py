"""The short commands on the registry and on stored nights."""

from __future__ import annotations

import getpass
from pathlib import Path

from configs.errors import NightjarError
from tasks.last_config import site_of
from tasks.night_state import NightBook


def roll_back(home: Path, to: str | None, why: str) -> str:
    """Put an earlier champion back, and say what changed."""
    from tasks.preflight import check_tracking
    from tasks.rollback import rollback

    site = site_of(home)
    check_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
    return rollback(site, why=why, to=to, by=getpass.getuser()).sentence


def reconcile_now(home: Path) -> str:
    """Close what dead processes left open, and say what was done."""
    from tasks.preflight import check_tracking
    from tasks.reconcile import reconcile
    from tasks.tracking import finish_late

    site = site_of(home)
    check_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
    late = [f"the run of night {night} was ended late" for night in finish_late(site)]
    done = reconcile(site)
    closed = [f"MLflow run {run} of a dead process was ended as KILLED" for run in done.closed_runs]
    sentences = [*late, *done.settled, *closed, *done.problems]
    return "\n".join(sentences) if sentences else "nothing to do: everything was closed properly"


def answer(home: Path, model: str | None, prompt: str, max_new_tokens: int) -> str:
    """One answer of a registered version."""
    from tasks.registry import CHAMPION

    site = site_of(home)
    uri = model or f"models:/{site.model}@{CHAMPION}"
    if not uri.startswith("models:/"):
        raise NightjarError(f"--model {uri} is not a registry address", "write models:/NAME@champion or models:/NAME/3")
    with site.worker() as worker:
        return worker.answer(uri, [prompt], max_new_tokens).texts[0]


def explain_gate(home: Path, night: str) -> str:
    """The decision of a night in words."""
    from tasks.judging import explain_night

    book = NightBook(home)
    known = [state.night for state in book.nights()]
    if night not in known:
        raise NightjarError(f"home {home} has no night {night!r}", f"it has {', '.join(known[-5:]) or 'none yet'}")
    return explain_night(book, book.load(night))

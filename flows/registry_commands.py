"""The short commands on the registry and on stored nights."""

from __future__ import annotations

import os
from pathlib import Path

from configs.errors import ConfigError, NightjarError
from configs.schema.registry import RegistryConfig
from flows.exit_codes import BUSY, DONE, USER
from flows.user_name import user_name
from tasks.asking import ask
from tasks.chains import chains_of, chosen, only_one
from tasks.last_config import site_of
from tasks.mlflow_client import DATABASE, is_embedded
from tasks.night_state import NightBook
from tasks.registry import CHAMPION
from tasks.site import Site
from training.errors import ContractError


def roll_back(home: Path, to: str | None, why: str, chain: str | None = None, model: str | None = None) -> str:
    """Put an earlier champion back, and say what changed."""
    from tasks.preflight import check_existing_tracking
    from tasks.rollback import rollback

    site = site_of(home, chain, model)
    check_existing_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
    return rollback(site, why=why, to=to, by=user_name()).sentence


def promote(
    home: Path, version: str, *, force: bool, why: str, chain: str | None = None, model: str | None = None
) -> str:
    """Make a registered version champion, and say what changed."""
    from tasks.preflight import check_existing_tracking
    from tasks.promote_by_hand import promote_by_hand
    from tasks.promotion import Force

    if force != bool(why.strip()):
        raise ConfigError("--force and --why belong together", "give both, or neither; both are recorded")
    who = user_name()
    site = site_of(home, chain, model)
    check_existing_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
    done = promote_by_hand(site, version, who, Force(who, why) if force else None)
    if not done.changed:
        return f"version {version} of {site.model} is champion already: nothing to do"
    before = "there was none before" if done.previous is None else f"version {done.previous} was it before"
    return f"version {version} of {site.model} is champion, {before}; its bytes and its answers were verified"


def retain_versions(
    home: Path, *, apply: bool, keep: int | None = None, chain: str | None = None, model: str | None = None
) -> str:
    """Which old versions go and which stay, each with its reason; with `apply` they go."""
    from tasks.preflight import check_existing_tracking
    from tasks.retention import planned, retain

    site = site_of(home, chain, model)
    check_existing_tracking(site.tracking_uri, site.config.reach_timeout_seconds)
    decided = (retain if apply else planned)(site, keep)
    if not decided.delete:
        first = f"no version of {site.model} is old enough to be deleted, or all that are old are protected"
    else:
        first = f"version {', '.join(decided.delete)} of {site.model} {'was' if apply else 'would be'} deleted"
    reasons = dict.fromkeys(decided.protected.values())
    stays = {reason: [number for number, its in decided.protected.items() if its == reason] for reason in reasons}
    newest = site.config.retention_keep if keep is None else keep
    if apply:
        last = "the disk is free again once `mlflow gc` has run on MLflow's database" if decided.delete else ""
    else:
        asked = "nothing was changed: --apply deletes them" if decided.delete else "nothing to do"
        last = f"{asked}; the newest {newest} stay in any case (registry.retention_keep, or --keep)"
    kept = [f"version {', '.join(numbers)} stays: {reason}" for reason, numbers in stays.items()]
    return "\n".join(line for line in (first, *kept, last) if line)


def reconcile_now(
    home: Path, chain: str | None = None, model: str | None = None, adopt: str | None = None
) -> tuple[str, int]:
    """Close what dead processes left open; say what was done, and the exit code: DONE, USER when something is left for
    a person, BUSY when a promotion or rollback was at work, so that the command is to be repeated.

    `adopt`: why the registry is taken as it is; null: it is not.
    """
    from tasks.adoption import adopt as take_as_it_is
    from tasks.finish_late import finish_late
    from tasks.preflight import check_existing_tracking, check_tracking
    from tasks.reconcile import reconcile

    if adopt is not None and not adopt.strip():
        raise ConfigError("--adopt needs a reason", "add --why TEXT; it goes into the journal")
    site = site_of(home, chain, model)
    reach = check_existing_tracking if adopt is None else check_tracking
    reach(site.tracking_uri, site.config.reach_timeout_seconds)
    adopted = [] if adopt is None else [take_as_it_is(site, by=user_name(), why=adopt)]
    lost = _close_lost_runs(home, chain)
    ended = finish_late(site)
    late = [*(f"the run of night {night} was ended late" for night in ended.nights), *ended.problems]
    done = reconcile(site)
    closed = [f"MLflow run {run} of a dead process was ended as KILLED" for run in done.closed_runs]
    sentences = [*adopted, *lost, *late, *done.settled, *closed, *done.problems, *done.busy, *done.moved]
    told = "\n".join(sentences) if sentences else "nothing to do: everything was closed properly"
    return told, USER if done.problems else BUSY if done.busy else DONE


def _close_lost_runs(home: Path, chain: str | None) -> list[str]:
    """Runs that a Prefect server believes to go on, whose processes are gone; nothing where no server is named."""
    if not os.environ.get("PREFECT_API_URL"):
        return []
    import httpx
    from prefect.exceptions import PrefectHTTPStatusError

    from flows.lost_runs import close_lost_runs

    try:
        return [told for known in chosen(home, chain, None) for told in close_lost_runs(home, known.name)]
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        return [f"Prefect does not answer ({type(error).__name__}): its runs were not looked at"]


def answer(home: Path, model: str | None, prompt: str, max_new_tokens: int, chain: str | None = None) -> str:
    """One answer of a registered version. An address needs no nights in this home, only a registry that knows it."""
    from tasks.preflight import require_database

    if model is None:
        site = site_of(home, chain)
        uri = f"models:/{site.model}@{CHAMPION}"
    else:
        site, uri = _registry_that_knows(home, chain), model
    require_database(site.tracking_uri)
    return ask(site, uri, prompt, max_new_tokens)


def _registry_that_knows(home: Path, chain: str | None) -> Site:
    """The chain's registry; the one of all chains when they share it; else what the environment names."""
    known = chosen(home, chain, None) if chain is not None else chains_of(home)
    sites = {site.tracking_uri: site for site in (Site.open(home, one.registry) for one in known)}
    if len(sites) > 1:
        only_one(home, known)
    anywhere = Site.open(home, RegistryConfig())
    site = next(iter(sites.values()), anywhere)
    if is_embedded(home, site.tracking_uri) and not (home / DATABASE).is_file():
        chosen(home, None, None)  # says that nothing is here yet
    return site


def explain_gate(home: Path, night: str) -> str:
    """The decision of a night in words."""
    from tasks.judging import explain_damaged_night, explain_night

    book = NightBook(home)
    known = book.names()
    if night not in known:
        raise NightjarError(f"home {home} has no night {night!r}", f"it has {', '.join(known[-5:]) or 'none yet'}")
    try:
        state = book.load(night)
    except ContractError as damage:
        return explain_damaged_night(book, night, damage)
    return explain_night(book, state)

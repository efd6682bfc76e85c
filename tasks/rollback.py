"""Taking the champion down and putting an earlier one back: one idempotent act for the flow, the watch and people."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tasks.agreement import require_named_champion, settled
from tasks.journal import Entry, new_act
from tasks.registry import CHAMPION, PREVIOUS
from tasks.registry_errors import PromotionError, RegistryError, RollbackRefused
from tasks.rolled_back import mark_rolled_back
from tasks.settle import settle_unfinished
from tasks.site import Site
from tasks.version_tags import DIGEST, PROMOTED_AT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollback:
    """The outcome: `changed` is False when it had been done before; `sentence` is for people."""

    changed: bool
    taken_down: str | None
    restored: str
    sentence: str


def rollback(
    site: Site, *, why: str, to: str | None = None, away_from: str | None = None, by: str | None = None
) -> Rollback:
    """Put an earlier champion back; the one taken down is banned until a person forces it.

    `to`: which one; null: the one the journal names. `away_from`: do it only while this version is champion, so that a
    late or doubled event takes nobody else down. Without either, a second call after a rollback changes nothing.
    Raises RollbackRefused with the champion untouched: nobody earlier, or the target is gone, banned or broken; and
    JournalContradicted, since a journal that was cut would name the wrong one.
    """
    if not why.strip():
        raise RollbackRefused("a rollback needs a reason", "give --why TEXT; it becomes a tag of the version")
    with site.locked(f"rollback of {site.model}"):
        settled(site)
        require_named_champion(site)
        current = site.registry.alias(CHAMPION)
        if current is None:
            raise RollbackRefused(f"{site.model} has no champion, so there is nothing to roll back")
        to = None if to is None else _number(site, to, current)
        done = _already_done(site, current, to, away_from)
        if done is not None:
            return Rollback(False, None, current, done)
        target = _target(site, current, to)
        _prove(site, target)
        _tidy(site, _switch(site, current, target, why, by))
    return Rollback(True, current, target, f"version {current} was rolled back to version {target}: {why}")


def _number(site: Site, to: str, current: str) -> str:
    """`to` as the registry writes it: MLflow finds version 2 under "02" and " 2" too, which no alias ever names."""
    try:
        return site.registry.version(to).number
    except RegistryError:
        raise RollbackRefused(f"{site.model} has no version {to}; version {current} stays") from None


def _already_done(site: Site, current: str, to: str | None, away_from: str | None) -> str | None:
    if away_from is not None and current != away_from:
        return f"version {away_from} is not champion (version {current} is): nothing to do"
    if to is not None and current == to:
        return f"version {to} is champion already: nothing to do"
    # Whatever was tried and taken back since then is no reason to go further back.
    last = site.journal.standing(site.model).last_change
    repeated = last is not None and last.event == "rolled_back" and last.restored == current
    if to is None and away_from is None and repeated:
        assert last is not None
        return (
            f"version {last.taken_down} was rolled back to version {current} already: nothing to do; "
            "to go further back name a version with --to"
        )
    return None


def _target(site: Site, current: str, to: str | None) -> str:
    if to is None:
        found = site.journal.previous_champion(site.model, current)
        if found is None:
            raise RollbackRefused(
                f"{site.model}: no earlier champion is known to the journal, so version {current} stays",
                "promote another version, or switch serving off; there is nothing to fall back to",
            )
        return found
    version = site.registry.version(to)
    if site.journal.is_banned(site.model, to, version.tags.get(DIGEST)):
        raise RollbackRefused(
            f"version {to} was itself rolled back before; version {current} stays",
            f"choose one of {', '.join(site.journal.champions(site.model)) or 'none'}, or say {_by_force(to)}",
        )
    if to not in site.journal.champions(site.model) and PROMOTED_AT not in version.tags:
        raise RollbackRefused(
            f"version {to} was never champion, so going to it is a promotion; version {current} stays",
            f"say {_by_force(to)}",
        )
    return to


def _by_force(version: str) -> str:
    return f"`nightjar promote {version} --force --why TEXT`"


def _prove(site: Site, target: str) -> None:
    """The target's bytes are unchanged and it generates; otherwise the rollback would make things worse."""
    try:
        with site.unchanged(site.registry.version(target)) as stored, site.worker() as worker:
            worker.answer(str(stored), site.config.verify_prompts, site.config.verify_max_new_tokens)
    except (PromotionError, RegistryError) as error:
        raise RollbackRefused(
            f"version {target} cannot be put back: {error}",
            "name another earlier version with --to; the champion stays",
        ) from error


def _switch(site: Site, current: str, target: str, why: str, by: str | None) -> Entry:
    """Announce, move, read back, close; the closing line. Dying in between is completed by settle_unfinished."""
    entry = Entry(
        event="rollback_pending",
        model=site.model,
        act=new_act(),
        taken_down=current,
        restored=target,
        digest=site.registry.version(current).tags.get(DIGEST),
        why=why,
        by=by,
    )
    site.journal.write(entry)
    settle_unfinished(site)
    closed = site.journal.last_closed(site.model)
    if closed is None or closed.act != entry.act or closed.event != "rolled_back":
        raise RollbackRefused(
            f"the champion of {site.model} was moved by somebody else during the rollback",
            "look at the aliases in MLflow, then decide again",
        )
    return closed


def _tidy(site: Site, closed: Entry) -> None:
    """Tags and helper aliases. The rollback stands whatever happens here; reconcile mends what is missing."""
    try:
        mark_rolled_back(site, closed)
        site.registry.put_alias(PREVIOUS, site.journal.previous_champion(site.model))
    except (RegistryError, ConnectionError) as error:
        log.warning("version %s was rolled back, but its tags are not complete: %s", closed.taken_down, error)

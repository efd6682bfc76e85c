"""Closing what was announced in the journal and never finished. The caller holds the model's lock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.journal import Entry
from tasks.registry import CHAMPION
from tasks.registry_errors import RegistryError
from tasks.site import Site

KILLED = "the process that was at it ended before it was done"


@dataclass(frozen=True)
class Settled:
    """One act that was closed, in words: `outcome` is reverted or completed."""

    act: str
    outcome: str
    champion: str | None
    sentence: str


def settle_unfinished(site: Site, why: str = KILLED) -> list[Settled]:
    """Revert promotions without `verified`, complete rollbacks without `rolled_back`.

    An alias that names neither side of the act was moved by somebody else and is left alone. Doing this twice changes
    nothing. With the model's lock held by the caller nothing announced can still be at work.
    """
    newest_first = reversed(site.journal.unfinished(site.model))
    return [_revert(site, act, why) if act.event == "pending" else _complete(site, act) for act in newest_first]


def _revert(site: Site, entry: Entry, why: str) -> Settled:
    current = site.registry.alias(CHAMPION)
    if current == entry.candidate:
        site.registry.put_alias(CHAMPION, entry.previous)
        _require(site, entry.previous)
        outcome = f"was reverted: {_name(entry.previous)} is champion again"
    elif current == entry.previous:
        outcome = f"had not moved the alias: {_name(current)} stays champion"
    else:
        outcome = f"is void: {_name(current)} was made champion meanwhile"
    sentence = f"promotion of version {entry.candidate} {outcome} ({why})"
    site.journal.write(replace(entry, event="reverted", why=sentence))
    return Settled(entry.act, "reverted", site.registry.alias(CHAMPION), sentence)


def _complete(site: Site, entry: Entry) -> Settled:
    """A rollback was decided with a reason; dying half-way does not make the bad version good."""
    current = site.registry.alias(CHAMPION)
    if current not in (entry.taken_down, entry.restored):
        sentence = f"rollback of version {entry.taken_down} is void: {_name(current)} was made champion meanwhile"
        site.journal.write(replace(entry, event="reverted", why=sentence))
        return Settled(entry.act, "reverted", current, sentence)
    site.registry.put_alias(CHAMPION, entry.restored)
    _require(site, entry.restored)
    site.journal.write(replace(entry, event="rolled_back"))
    sentence = f"rollback of version {entry.taken_down} was completed: version {entry.restored} is champion"
    return Settled(entry.act, "completed", entry.restored, sentence)


def _require(site: Site, version: str | None) -> None:
    found = site.registry.alias(CHAMPION)
    if found != version:
        raise RegistryError(
            f"alias {CHAMPION} of {site.model} was set to {_name(version)} but names {_name(found)}",
            "look who else writes this alias, then run `nightjar reconcile`",
        )


def _name(version: str | None) -> str:
    return "no version" if version is None else f"version {version}"

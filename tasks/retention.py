"""Deleting old versions: only by this act, which a person asks for; never one that somebody may still go back to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.agreement import settled
from tasks.approval import waiting_nights
from tasks.journal import Entry, new_act
from tasks.locks import held_lock
from tasks.night_lock import LOCK
from tasks.night_state import NightBook
from tasks.registry import Version
from tasks.site import Site
from tasks.version_tags import DIGEST


@dataclass(frozen=True)
class RetentionPlan:
    """Versions that would go, oldest first, and those that stay though they are old, each with the reason."""

    delete: tuple[str, ...]
    protected: dict[str, str]


def plan(
    versions: Sequence[Version], aliased: dict[str, str], kept: Mapping[str, str], keep: int
) -> RetentionPlan:
    """Decide without touching anything.

    Stays: the newest `keep`; what any alias names (also aliases that people made); `kept` (version -> reason); what
    Nightjar did not register.
    """
    by_alias = {version: alias for alias, version in aliased.items()}
    newest = {version.number for version in sorted(versions, key=lambda v: int(v.number))[-keep:]} if keep else set()
    delete, protected = [], {}
    for version in sorted(versions, key=lambda v: int(v.number)):
        if version.number in by_alias:
            protected[version.number] = f"alias {by_alias[version.number]}"
        elif version.number in kept:
            protected[version.number] = kept[version.number]
        elif DIGEST not in version.tags:
            protected[version.number] = "not registered by Nightjar"
        elif version.number not in newest:
            delete.append(version.number)
    return RetentionPlan(tuple(delete), protected)


def planned(site: Site, keep: int | None = None) -> RetentionPlan:
    """The plan for the registry as it is now; `keep` null: registry.retention_keep."""
    keep = site.config.retention_keep if keep is None else keep
    waiting = {state.version: state.night for state in waiting_nights(NightBook(site.home)) if state.version}
    kept = {number: f"night {night} waits for a person's answer" for number, night in waiting.items()}
    kept |= dict.fromkeys(site.journal.protected(site.model), "a rollback may return to it")
    versions = site.registry.versions()
    return plan(versions, site.registry.aliased() if versions else {}, kept, keep)


def retain(site: Site, keep: int | None = None) -> RetentionPlan:
    """Carry the plan out, one version after the other; no night of this home is at work meanwhile. Raises LockHeld.

    Each is announced in the journal first: one that is gone without a line would look lost, and stop every night.
    """
    with held_lock(site.home / LOCK, f"retention of {site.model}"), site.locked(f"retention of {site.model}"):
        settled(site)
        decided = planned(site, keep)
        for number in decided.delete:
            site.journal.write(Entry("retired", site.model, new_act(), taken_down=number, why="retention"))
            site.registry.delete_version(site.registry.version(number))
    return decided

"""Deleting old versions: only by this act, never by a night, and never one that somebody may still go back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.agreement import settled
from tasks.journal import Entry, new_act
from tasks.registry import Version
from tasks.site import Site
from tasks.version_tags import DIGEST


@dataclass(frozen=True)
class RetentionPlan:
    """Versions that would go, oldest first, and those that stay though they are old, each with the reason."""

    delete: tuple[str, ...]
    protected: dict[str, str]


def plan(versions: Sequence[Version], aliased: dict[str, str], returnable: set[str], keep: int) -> RetentionPlan:
    """Decide without touching anything.

    Stays: the newest `keep`; what any alias names (also aliases that people made); what the journal may return to; what
    Nightjar did not register.
    """
    by_alias = {version: alias for alias, version in aliased.items()}
    newest = {version.number for version in sorted(versions, key=lambda v: int(v.number))[-keep:]} if keep else set()
    delete, protected = [], {}
    for version in sorted(versions, key=lambda v: int(v.number)):
        if version.number in by_alias:
            protected[version.number] = f"alias {by_alias[version.number]}"
        elif version.number in returnable:
            protected[version.number] = "the journal may return to it"
        elif DIGEST not in version.tags:
            protected[version.number] = "not registered by Nightjar"
        elif version.number not in newest:
            delete.append(version.number)
    return RetentionPlan(tuple(delete), protected)


def planned(site: Site, keep: int | None = None) -> RetentionPlan:
    """The plan for the registry as it is now; `keep` null: registry.retention_keep."""
    keep = site.config.retention_keep if keep is None else keep
    protected = site.journal.protected(site.model)
    return plan(site.registry.versions(), site.registry.aliased(), protected, keep)


def retain(site: Site, keep: int | None = None) -> RetentionPlan:
    """Carry the plan out, one version after the other, each announced in the journal once it is gone."""
    with site.locked(f"retention of {site.model}"):
        settled(site)
        decided = planned(site, keep)
        for number in decided.delete:
            site.registry.delete_version(site.registry.version(number))
            site.journal.write(Entry("retired", site.model, new_act(), taken_down=number, why="retention"))
    return decided

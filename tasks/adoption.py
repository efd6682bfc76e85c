"""Taking the registry as it is, where journal or database was lost and no backup is left: a person's act, recorded."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.agreement import compare
from tasks.journal import Entry, Standing, new_act
from tasks.registry import CHAMPION, PREVIOUS, Version
from tasks.registry_errors import PromotionError
from tasks.site import Site
from tasks.version_tags import DIGEST, FORCED, PROMOTED_AT, ROLLBACK_REASON, ROLLED_BACK_AT


def adopt(site: Site, *, by: str, why: str) -> str:
    """Write one line into the journal after which it agrees with the registry, and say what it holds.

    The champion is the one that the alias names; whom a rollback returns to and what is banned is read from the
    versions' tags, and from the journal as far as it is there. Nothing is written where both agree already. An alias
    that names nobody stays so, and nights are refused until a person has promoted one of those that were champion.
    Raises PromotionError without a reason, JournalError when the journal is damaged (move it aside first), LockHeld.
    """
    if not why.strip():
        raise PromotionError("taking the registry as it is needs a reason", "add --why TEXT; it goes into the journal")
    with site.locked(f"adoption of {site.model}"):
        found = compare(site)
        if not (found.lost or found.moved):
            return f"registry and journal of {site.model} agree: there is nothing to adopt"
        entry = _entry(site, by, why)
        site.journal.write(entry)
        site.registry.put_alias(PREVIOUS, site.journal.previous_champion(site.model))
    return _sentence(site, entry)


def _entry(site: Site, by: str, why: str) -> Entry:
    standing, versions = site.journal.standing(site.model), site.registry.versions()
    champion = site.registry.alias(CHAMPION)
    banned = {v.number: v.tags.get(DIGEST) for v in versions if _is_banned(v, standing) and v.number != champion}
    earlier = [number for number in _promoted(versions, standing) if number != champion and number not in banned]
    return Entry(
        event="adopted",
        model=site.model,
        act=new_act(),
        champions=(*earlier, *([champion] if champion is not None else [])),
        banned=banned,
        ever_taken_down=tuple(version.number for version in versions if ROLLED_BACK_AT in version.tags),
        by=by,
        why=why,
    )


def _promoted(versions: Sequence[Version], standing: Standing) -> list[str]:
    """Versions that have been champion, the longest ago first."""
    known = set(standing.champions)
    been = [version for version in versions if PROMOTED_AT in version.tags or version.number in known]
    return [v.number for v in sorted(been, key=lambda v: (v.tags.get(PROMOTED_AT, ""), int(v.number)))]


def _is_banned(version: Version, standing: Standing) -> bool:
    """Rolled back, and not forced since (a forced promotion writes the time of promotion anew)."""
    tags = version.tags
    forced = FORCED in tags and tags.get(PROMOTED_AT, "") > tags.get(ROLLED_BACK_AT, "")
    return (version.number in standing.banned or ROLLBACK_REASON in tags) and not forced


def _sentence(site: Site, entry: Entry) -> str:
    champion = site.registry.alias(CHAMPION)
    earlier = [number for number in entry.champions if number != champion]
    parts = [f"champion {'none' if champion is None else f'version {champion}'}"]
    parts += [f"before it {', '.join(reversed(earlier))}"] if earlier else []
    parts += [f"banned {', '.join(entry.banned)}"] if entry.banned else []
    return f"the journal of {site.model} takes the registry as it is: {'; '.join(parts)} ({entry.by}: {entry.why})"

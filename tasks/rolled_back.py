"""What everybody sees of a rollback: why and when, as tags and on top of the version's page, and the helper aliases.

The journal decides; this follows it. It is written right after the rollback, and by reconcile where the process that
rolled back was killed before it had come to that.
"""

from __future__ import annotations

from tasks.journal import Entry
from tasks.night_page import with_rollback
from tasks.registry import CHALLENGER
from tasks.site import Site
from tasks.version_tags import ROLLBACK_REASON, ROLLED_BACK_AT


def mark_rolled_back(site: Site, entry: Entry) -> None:
    """Tell it of the version that this closed act took down. Repeated it changes nothing. Raises RegistryError."""
    assert entry.event == "rolled_back"
    assert entry.taken_down is not None
    tags = {ROLLED_BACK_AT: entry.time, ROLLBACK_REASON: entry.why or "no reason was noted"}
    told = site.registry.description(entry.taken_down)
    if not told.startswith(with_rollback("", tags).strip()):
        site.registry.describe(entry.taken_down, with_rollback(told, tags))
    # Last: `mend_marks` takes the tags as the sign that all of it is there.
    site.registry.tag(entry.taken_down, tags)
    if site.registry.alias(CHALLENGER) == entry.taken_down:
        site.registry.delete_alias(CHALLENGER)


def mend_marks(site: Site) -> list[str]:
    """Mark what a killed process has rolled back without telling. Returns the versions. Raises RegistryError."""
    if not (banned := site.journal.banned_versions(site.model)):
        return []
    acts = [entry for entry in site.journal.entries(site.model) if entry.event == "rolled_back"]
    newest = {entry.taken_down: entry for entry in acts if entry.taken_down in banned}
    told = {version.number: version.tags.get(ROLLED_BACK_AT, "") for version in site.registry.versions()}
    missing = [entry for number, entry in newest.items() if number in told and told[number] < entry.time]
    for entry in missing:
        mark_rolled_back(site, entry)
    return [str(entry.taken_down) for entry in missing]

"""A person makes a registered version champion, by the same verified act as a night."""

from __future__ import annotations

from configs.errors import NightjarError
from tasks.approval import Undecided, answer_lock, write_down
from tasks.night_state import NightBook
from tasks.promotion import Force, Promotion, promote
from tasks.registry import CHAMPION, Version
from tasks.registry_errors import PromotionError
from tasks.site import Site
from tasks.version_tags import JUDGED_AGAINST, NIGHT, VERDICT


def promote_by_hand(site: Site, number: str, by: str, force: Force | None = None) -> Promotion:
    """Make version `number` champion: what passed the gate against the present champion, or by `force` any other.

    `by`: who asks; goes into the journal. Raises PromotionError and its kin (BannedVersion and PromotionRaced only
    without `force`), LockHeld, TrackingUnavailable; the champion is then the one from before.
    """
    with answer_lock(site, f"promotion of version {number} by hand"):
        version = _known(site, number)
        champion = site.registry.alias(CHAMPION)
        if force is None and champion != number:
            _require_pass(version)
        judged_against = champion if force is not None else _judged_against(version)
        done = promote(site, number, judged_against=judged_against, force=force, by=by)
        if done.changed:
            _tell_night(site, version, f"promoted by {by}" + (f": {force.why}" if force is not None else ""))
    return done


def _known(site: Site, number: str) -> Version:
    versions = {version.number: version for version in site.registry.versions()}
    if number not in versions:
        raise PromotionError(
            f"{site.model} has no version {number!r}", f"it has {', '.join(list(versions)[-10:]) or 'none yet'}"
        )
    return versions[number]


def _require_pass(version: Version) -> None:
    verdict = version.tags.get(VERDICT)
    if verdict != "PASS":
        what = f"the gate said {verdict} of version {version.number}" if verdict else "no gate has judged it"
        explain = f"`nightjar gate explain {version.tags[NIGHT]}` tells the reasons; " if NIGHT in version.tags else ""
        raise PromotionError(
            f"version {version.number} is not promoted: {what}",
            f"{explain}a person who knows better says `nightjar promote {version.number} --force --why TEXT`",
        )


def _judged_against(version: Version) -> str | None:
    against = version.tags.get(JUDGED_AGAINST, "none")
    return None if against == "none" else against


def _tell_night(site: Site, version: Version, sentence: str) -> None:
    """The night that made the version says on its page what became of it, and asks nobody any more."""
    book = NightBook(site.home)
    try:
        state = book.load(version.tags.get(NIGHT, ""))
    except NightjarError:
        return  # of another home, or not readable: journal and tags say it all the same
    if state.status == "finished" and state.version == version.number:
        write_down(Undecided(site, book, state), promoted=True, reason=sentence)

"""Do registry and journal tell the same story? Tags outlive a lost journal, the journal and the nights a lost database.

A champion moved by hand is no contradiction: it stands, and is told. Something that was lost is one: nothing is
promoted or rolled back before a person has restored it, or has taken the registry as it is (tasks.adoption).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from configs.credentials import without_credentials
from configs.errors import NightjarError
from tasks.journal import Standing
from tasks.mlflow_client import missing_database, tracking_uri_of
from tasks.night_state import NightBook, NightState
from tasks.registry import CHAMPION, Version
from tasks.registry_errors import JournalContradicted
from tasks.settle import Settled, settle_unfinished
from tasks.site import Site
from tasks.version_tags import DIGEST, NIGHT, PROMOTED_AT, ROLLED_BACK_AT

ADOPT = "`nightjar reconcile --adopt --why TEXT`"


@dataclass(frozen=True)
class Agreement:
    """`lost`: contradictions that forbid every act; `moved`: what other hands did, which stands. A sentence each."""

    lost: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()


def compare(site: Site) -> Agreement:
    """Hold tags and aliases against the journal and the nights. Raises TrackingUnavailable, JournalError."""
    standing = site.journal.standing(site.model)
    versions = {version.number: version for version in site.registry.versions()}
    champion = site.registry.alias(CHAMPION)
    lost = (*_unknown_to_the_journal(site, standing, versions), *_gone_from_the_registry(site, standing, versions))
    return Agreement(lost, tuple(_moved(site, standing, versions, champion)))


def require_agreement(site: Site) -> None:
    """Raises JournalContradicted when something was lost."""
    if lost := compare(site).lost:
        raise JournalContradicted("; ".join(lost), way_out(site))


def require_named_champion(site: Site) -> None:
    """Raises JournalContradicted when the journal knows a champion and the alias names none.

    A night would take itself for the first one ever: every comparison with the champion would be skipped.
    """
    known = site.journal.champions(site.model)
    if known and site.registry.alias(CHAMPION) is None:
        raise JournalContradicted(
            f"the alias {CHAMPION} of {site.model} is gone, and the journal knows version {known[-1]} as champion",
            f"put it back: `nightjar promote {known[-1]} --force --why TEXT`, or any other version so",
        )


def settled(site: Site) -> list[Settled]:
    """How every act begins: `settle_unfinished`, on a journal that can be believed. Raises JournalContradicted."""
    require_agreement(site)
    return settle_unfinished(site)


def require_kept_database(site: Site) -> None:
    """Before asking makes an empty one: no version is known to have been in it. Raises JournalContradicted."""
    file = missing_database(site.tracking_uri)
    if file is None:
        return
    standing = site.journal.standing(site.model)
    night = _newest(site, standing, lambda state: True)
    if night is not None or standing.champions:
        what = f"version {night.version} of night {night.night}" if night else f"version {standing.champions[-1]}"
        raise JournalContradicted(f"{file} is missing or empty, and {what} was registered there", way_out(site))


def way_out(site: Site) -> str:
    """What a person does about a contradiction."""
    return (
        f"restore {site.journal.log.path} or MLflow's database from a backup; if there is none, {ADOPT} "
        "takes the registry as it is from here on"
    )


def _unknown_to_the_journal(site: Site, standing: Standing, versions: Mapping[str, Version]) -> Iterator[str]:
    """Both tags are written after the journal's line, so a tag without a line means a lost line."""
    marks = ((PROMOTED_AT, "promoted", standing.promoted), (ROLLED_BACK_AT, "rolled back", standing.taken_down))
    for tag, word, known in marks:
        numbers = [number for number, version in versions.items() if tag in version.tags and number not in known]
        if numbers:
            yield (
                f"version {', '.join(numbers)} of {site.model} was {word}, as its tag says, and "
                f"{site.journal.log.path} does not know: the journal was lost or cut"
            )


def _gone_from_the_registry(site: Site, standing: Standing, versions: Mapping[str, Version]) -> Iterator[str]:
    where = f"MLflow at {without_credentials(site.tracking_uri)}"
    current = standing.champions[-1] if standing.champions else None
    if current is not None and current not in versions:
        yield f"version {current} of {site.model} is champion by the journal, and {where} has no such version"
        return
    digests = (standing.promoted.get(current), versions[current].tags.get(DIGEST)) if current is not None else ()
    if all(digests) and len(set(digests)) > 1:
        yield f"version {current} of {site.model} in {where} is not the one that the journal promoted"
        return
    night = _newest(site, standing, lambda state: state.promoted and state.version not in standing.banned)
    if night is not None and not _is_there(night, versions):
        yield f"night {night.night} promoted version {night.version} of {site.model}, and {where} has it no more"


def _moved(site: Site, standing: Standing, versions: Mapping[str, Version], champion: str | None) -> Iterator[str]:
    current = standing.champions[-1] if standing.champions else None
    if current is not None and champion != current:
        yield (
            f"the journal knows version {current} of {site.model} as champion, the alias names "
            f"{'none' if champion is None else f'version {champion}'}"
        )
    if current is None and champion is not None:
        yield (
            f"version {champion} of {site.model} is champion, and the journal knows of none: it was promoted by hand, "
            "or the journal was lost"
        )
    gone = [number for number in standing.champions[:-1] if number not in versions]
    if gone:
        yield f"no rollback can return to version {', '.join(gone)} of {site.model}: the registry has it no more"
    night = _newest(site, standing, lambda state: not state.promoted)
    if night is not None and not _is_there(night, versions):
        yield f"night {night.night} registered version {night.version} of {site.model}, and the registry has it no more"


def _is_there(night: NightState, versions: Mapping[str, Version]) -> bool:
    version = versions.get(night.version or "")
    return version is not None and version.tags.get(NIGHT) in (None, night.night)


def _newest(site: Site, standing: Standing, wanted: Callable[[NightState], bool]) -> NightState | None:
    """The last night with a version in this registry, of those that nobody has deleted or adopted since."""
    book = NightBook(site.home)
    since = _seconds(standing.adopted)
    for state in reversed(book.nights()):
        is_candidate = state.version is not None and state.version not in standing.retired and state.started >= since
        if is_candidate and wanted(state) and _is_kept_here(site, book, state):
            return state
    return None


def _is_kept_here(site: Site, book: NightBook, state: NightState) -> bool:
    try:
        registry = book.config(state.night).registry
    except NightjarError:
        return False
    return (registry.model, tracking_uri_of(site.home, registry.tracking_uri)) == (site.model, site.tracking_uri)


def _seconds(stamp: str) -> float:
    """Seconds since 1970 of the journal's time; the beginning of time where there is none."""
    try:
        return datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0

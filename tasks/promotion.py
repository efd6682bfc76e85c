"""A verified version becomes champion, or everything is as it was.

Order: prove the stored bytes and one generation -> journal `pending` -> move the alias -> read it back -> generate
through the alias -> journal `verified`. What fails between `pending` and `verified` puts the previous champion back at
once; what kills the process there is put right by tasks.reconcile at the next start.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from tasks.agreement import settled
from tasks.journal import Entry, new_act
from tasks.registry import CHALLENGER, CHAMPION, PREVIOUS, Version
from tasks.registry_errors import BannedVersion, PromotionError, PromotionRaced, RegistryError, ServingError
from tasks.serving import ServingWorker
from tasks.settle import settle_unfinished
from tasks.site import Site
from tasks.version_tags import DIGEST, FORCED, NIGHT, PROMOTED_AT, ROLLBACK_REASON

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Force:
    """A person's decision to promote what the gate or an earlier rollback speaks against.

    `lifts_ban`: False where the person was asked about the gate alone.
    """

    who: str
    why: str
    lifts_ban: bool = True

    def __post_init__(self) -> None:
        if not self.who.strip() or not self.why.strip():
            raise PromotionError("a forced promotion needs who and why", "give both in words")


@dataclass(frozen=True)
class Promotion:
    """The outcome: `changed` is False when the candidate was champion already, by this journal. Times in seconds."""

    version: str
    previous: str | None
    changed: bool
    seconds: float


def promote(
    site: Site,
    candidate: str,
    *,
    judged_against: str | None,
    night: str | None = None,
    force: Force | None = None,
    by: str | None = None,
) -> Promotion:
    """Make `candidate` (a version that register_candidate returned) champion.

    `judged_against` is the champion's version that the gate compared with, null on a cold start; when the alias names
    another one by now, PromotionRaced is raised. `by`: who asked without forcing anything. Repeated after success it
    changes nothing.
    Raises BannedVersion, PromotionRaced, StoredBytesDiffer, ServingError, LockHeld, TrackingUnavailable, and
    JournalContradicted also with `force`; after each of them the champion is the one from before.
    """
    started = time.monotonic()
    with site.locked(f"promotion of version {candidate} of {site.model}"):
        settled(site)
        version = site.registry.version(candidate)
        previous = site.registry.alias(CHAMPION)
        if previous == candidate and candidate in site.journal.champions(site.model)[-1:]:
            tidy(site, version, force)
            done = site.journal.previous_champion(site.model, candidate)
            return Promotion(candidate, done, changed=False, seconds=time.monotonic() - started)
        _refuse_banned(site, version, force)
        _refuse_raced(previous, judged_against, candidate)
        with site.unchanged(version) as stored, site.worker() as worker:
            _generate(site, worker, str(stored), version)
            _switch(site, worker, _entry(site, version, previous, night, force, by), version)
        tidy(site, version, force)
    return Promotion(candidate, previous, changed=True, seconds=time.monotonic() - started)


def tidy(site: Site, version: Version, force: Force | None = None) -> None:
    """Bring helper aliases and tags after the journal. A failure here is logged, and mended by reconcile."""
    try:
        site.registry.put_alias(PREVIOUS, site.journal.previous_champion(site.model, version.number))
        if site.registry.alias(CHALLENGER) == version.number:
            site.registry.delete_alias(CHALLENGER)
        tags = {PROMOTED_AT: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        if force is not None:
            tags[FORCED] = f"{force.who}: {force.why}"
        if PROMOTED_AT not in version.tags or force is not None:
            site.registry.tag(version.number, tags)
    except (RegistryError, ConnectionError) as error:
        log.warning("version %s is champion, but its aliases and tags are not tidy: %s", version.number, error)


def _refuse_banned(site: Site, version: Version, force: Force | None) -> None:
    digest = version.tags.get(DIGEST)
    banned = site.journal.is_banned(site.model, version.number, digest) or ROLLBACK_REASON in version.tags
    if banned and not (force is not None and force.lifts_ban):
        why = version.tags.get(ROLLBACK_REASON, "the same weights were rolled back under another number")
        raise BannedVersion(
            f"version {version.number} of {site.model} was rolled back before ({why})",
            f"train a new version, or say `nightjar promote {version.number} --force --why TEXT`",
        )


def _refuse_raced(previous: str | None, judged_against: str | None, candidate: str) -> None:
    if previous != judged_against:
        judged = f"version {candidate} was judged against {_name(judged_against)}"
        raise PromotionRaced(
            f"{judged}, but the champion is {_name(previous)} by now",
            "run the evaluation and the gate again: the other champion stands, unless a person says "
            f"`nightjar promote {candidate} --force --why TEXT`",
        )


def _entry(
    site: Site, version: Version, previous: str | None, night: str | None, force: Force | None, by: str | None
) -> Entry:
    return Entry(
        event="pending",
        model=site.model,
        act=new_act(),
        previous=previous,
        candidate=version.number,
        night=night or version.tags.get(NIGHT),
        digest=version.tags.get(DIGEST),
        by=force.who if force else by,
        why=force.why if force else None,
        forced=force is not None,
    )


def _switch(site: Site, worker: ServingWorker, entry: Entry, version: Version) -> None:
    """The dangerous part, between `pending` and `verified`."""
    site.journal.write(entry)
    try:
        _move(site, version.number, entry.previous)
        _generate(site, worker, f"models:/{site.model}@{CHAMPION}", version)
        _read_back(site, version.number)
        site.journal.write(replace(entry, event="verified"))
    except BaseException as error:
        # Also on KeyboardInterrupt and a cancelled flow: nobody else would put it back before the next start.
        _restore(site, entry, error)
        raise


def _move(site: Site, candidate: str, previous: str | None) -> None:
    found = site.registry.alias(CHAMPION)
    if found != previous:
        raise PromotionRaced(f"the champion changed from {_name(previous)} to {_name(found)} during the promotion")
    site.registry.set_alias(CHAMPION, candidate)
    _read_back(site, candidate)


def _read_back(site: Site, candidate: str) -> None:
    found = site.registry.alias(CHAMPION)
    if found != candidate:
        raise PromotionRaced(f"the alias was set to {candidate}, but names {_name(found)}: somebody else moved it")


def _generate(site: Site, worker: ServingWorker, uri: str, version: Version) -> None:
    """One generation; it must come from this version's stored model."""
    answers = worker.answer(uri, site.config.verify_prompts, site.config.verify_max_new_tokens)
    if version.model_id is not None and answers.model_id != version.model_id:
        raise ServingError(f"{uri} loads model {answers.model_id}, not {version.model_id} of version {version.number}")


def _restore(site: Site, entry: Entry, error: BaseException) -> None:
    try:
        settle_unfinished(site, why=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    except Exception as failure:
        message = f"{error}; and the previous champion could not be put back yet: {failure}"
        raise PromotionError(message, "run `nightjar reconcile` as soon as MLflow answers") from error


def _name(version: str | None) -> str:
    return "no champion" if version is None else f"version {version}"

"""A night whose verdict was INCONCLUSIVE, as a person decides about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from configs.errors import NightjarError
from tasks.catch_up import catch_up
from tasks.judging import FOLDER, MARKDOWN
from tasks.last_config import site_of
from tasks.locks import held_lock
from tasks.night_state import NightBook, NightState
from tasks.promotion import Force, Promotion, promote
from tasks.site import Site
from training.errors import ContractError

VERDICT = "INCONCLUSIVE"
LOCK = "approval.lock"


class AnswerTooLate(NightjarError, RuntimeError):
    """The night waits for nobody any more; this answer has changed nothing."""


class Undecided:
    """The night, its version that waits as challenger, and the gate's page about it.

    No dataclass, since Prefect takes those apart on their way into a task.
    """

    def __init__(self, site: Site, book: NightBook, state: NightState) -> None:
        self.site = site
        self.book = book
        self.state = state

    @property
    def version(self) -> str:
        """The version that waits."""
        assert self.state.version is not None
        return self.state.version

    @property
    def headline(self) -> str:
        """One line for a subject."""
        return f"night {self.state.night} is undecided: promote version {self.version} of {self.site.model}?"

    @property
    def markdown(self) -> str:
        """The gate's sentences."""
        page = self.book.folder(self.state.night) / FOLDER / MARKDOWN
        return page.read_text(encoding="utf-8") if page.is_file() else self.headline


def undecided_night(
    home: Path, night: str | None = None, flow_run_id: str | None = None, chain: str | None = None
) -> Undecided | None:
    """The named night, the one of that flow run, or else the newest; None when it waits for nobody.

    Only the newest judged night of a chain can wait: an older challenger was overtaken. Raises ContractError naming an
    unknown night, and NightjarError when nights of several chains wait and none is named.
    """
    book = NightBook(home)
    nights = book.nights(chain)
    if night is not None and night not in [state.night for state in nights]:
        raise ContractError(f"home {home} has no night {night!r}", "look at `nightjar status`")
    waiting = [state for state in waiting_nights(book, chain) if _is_meant(state, night, flow_run_id)]
    if len(waiting) > 1:
        raise NightjarError(
            f"{len(waiting)} nights wait for a decision: {', '.join(state.night for state in waiting)}",
            "name one of them, or its chain",
        )
    if not waiting:
        return None
    found = Undecided(site_of(home, waiting[0].name), book, waiting[0])
    return None if found.version in found.site.journal.banned_versions(found.site.model) else found


def waiting_nights(book: NightBook, chain: str | None = None) -> list[NightState]:
    """The undecided nights that nobody has answered: of each chain at most its newest judged one."""
    newest = {state.name: state for state in book.nights(chain) if state.verdict is not None}
    return [state for state in newest.values() if _waits(state)]


def promote_approved(undecided: Undecided, force: Force) -> Promotion:
    """Make the version champion, by a person's word about the gate's doubt, which lifts no ban.

    Raises AnswerTooLate, LockHeld, and PromotionError and its kin; the champion then stays.
    """
    with _answering(undecided):
        champion = undecided.state.champion
        judged_against = champion.version if champion is not None else None
        night, word = undecided.state.night, replace(force, lifts_ban=False)
        done = promote(undecided.site, undecided.version, judged_against=judged_against, night=night, force=word)
        write_down(undecided, promoted=True, reason=f"approved by {force.who}: {force.why}")
    return done


def refuse(undecided: Undecided, sentence: str) -> None:
    """Write down that a person keeps the champion; the night is then not asked about again.

    Raises AnswerTooLate and LockHeld.
    """
    with _answering(undecided):
        if undecided.version in undecided.site.journal.champions(undecided.site.model)[-1:]:
            raise _too_late(undecided, f"version {undecided.version} is champion already")
        write_down(undecided, reason=sentence)


@contextmanager
def answer_lock(site: Site, purpose: str) -> Iterator[None]:
    """One person's decision at a time in this home. Raises LockHeld."""
    with held_lock(site.home / LOCK, purpose, site.config.lock_wait_seconds):
        yield


@contextmanager
def _answering(undecided: Undecided) -> Iterator[None]:
    """The only answer at a time, about the night as it is by now: hours may have passed since the form was shown."""
    book, night = undecided.book, undecided.state.night
    with answer_lock(undecided.site, f"the answer about {night}"):
        undecided.state = book.load(night)
        judged = [state for state in book.nights(undecided.state.name) if state.verdict is not None]
        if not _waits(undecided.state):
            raise _too_late(undecided, undecided.state.reason or "it is not undecided any more")
        if judged[-1].night != night:
            raise _too_late(undecided, f"night {judged[-1].night} was judged since")
        yield


def _too_late(undecided: Undecided, sentence: str) -> AnswerTooLate:
    return AnswerTooLate(
        f"night {undecided.state.night} waits for no answer any more: {sentence}",
        "this answer changes nothing; look at `nightjar status`",
    )


def write_down(undecided: Undecided, **fields: object) -> None:
    """Keep the answer, and let the night's page in MLflow say it, now or when MLflow is there again."""
    owed = (*undecided.state.owed, "the answer")
    undecided.book.change(undecided.state, owed=owed, **fields)
    catch_up(undecided.book)
    undecided.state = undecided.book.load(undecided.state.night)


def _waits(state: NightState) -> bool:
    answered = state.promoted or state.reason is not None
    return state.verdict == VERDICT and state.version is not None and not answered


def _is_meant(state: NightState, night: str | None, flow_run_id: str | None) -> bool:
    return night in (None, state.night) and flow_run_id in (None, state.flow_run_id)

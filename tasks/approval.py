"""A night whose verdict was INCONCLUSIVE, as a person decides about it."""

from __future__ import annotations

from pathlib import Path

from configs.errors import NightjarError
from tasks.catch_up import catch_up
from tasks.judging import FOLDER, MARKDOWN
from tasks.last_config import site_of
from tasks.night_state import NightBook, NightState
from tasks.promotion import Force, Promotion, promote
from tasks.site import Site
from training.errors import ContractError

VERDICT = "INCONCLUSIVE"


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
    newest = {state.name: state for state in nights if state.verdict is not None}
    waiting = [state for state in newest.values() if _waits(state) and _is_meant(state, night, flow_run_id)]
    if len(waiting) > 1:
        raise NightjarError(
            f"{len(waiting)} nights wait for a decision: {', '.join(state.night for state in waiting)}",
            "name one of them, or its chain",
        )
    return Undecided(site_of(home, waiting[0].name), book, waiting[0]) if waiting else None


def promote_approved(undecided: Undecided, force: Force) -> Promotion:
    """Make the version champion, by a person's word. Raises PromotionError and its kin; the champion then stays."""
    champion = undecided.state.champion
    judged_against = champion.version if champion is not None else None
    night = undecided.state.night
    done = promote(undecided.site, undecided.version, judged_against=judged_against, night=night, force=force)
    _write_down(undecided, promoted=True, reason=f"approved by {force.who}: {force.why}")
    return done


def refuse(undecided: Undecided, sentence: str) -> None:
    """Write down that a person keeps the champion; the night is then not asked about again."""
    _write_down(undecided, reason=sentence)


def _write_down(undecided: Undecided, **fields: object) -> None:
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

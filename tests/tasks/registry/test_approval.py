"""Several forms may be open for one undecided night: the first answer counts, and none lifts a ban."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tasks.approval import AnswerTooLate, Undecided, promote_approved, refuse, undecided_night
from tasks.locks import held_lock
from tasks.night_state import FrozenChampion, NightBook
from tasks.promotion import Force, promote
from tasks.registry import CHAMPION, Version
from tasks.registry_errors import BannedVersion, LockHeld
from tasks.rollback import rollback
from tasks.site import Site
from tests.stored_nights import keep_undecided

ADA, EVE = Force("Ada", "read thirty answers"), Force("Eve", "looks right")
NIGHT = "q-0002"


@pytest.fixture
def forms(site: Site, register: Callable[..., Version]) -> Callable[[], Undecided]:
    """Version 1 is champion, version 2 waits; each call is one more form that shows it as it is now."""
    first, second = register(1).number, register(2, NIGHT).number
    promote(site, first, judged_against=None)
    champion = FrozenChampion(version=first, digest="d", model="m")
    keep_undecided(site.home, NIGHT, 2, second, champion=champion, champion_frozen=True)
    return lambda: Undecided(site, NightBook(site.home), NightBook(site.home).load(NIGHT))


def test_the_first_answer_counts(site: Site, forms: Callable[[], Undecided]) -> None:
    for_ada, for_bob, for_eve = forms(), forms(), forms()
    assert promote_approved(for_ada, ADA).changed
    with pytest.raises(AnswerTooLate, match=r"night q-0002 .* approved by Ada: read thirty answers"):
        refuse(for_bob, "Bob keeps the champion: too curt")
    night = NightBook(site.home).load(NIGHT)
    assert (night.promoted, night.reason) == (True, "approved by Ada: read thirty answers")

    assert rollback(site, why="it rambles", away_from="2").changed
    with pytest.raises(AnswerTooLate):
        promote_approved(for_eve, EVE)
    assert (site.registry.alias(CHAMPION), list(site.journal.banned_versions(site.model))) == ("1", ["2"])


def test_a_no_that_came_first_counts_as_well(site: Site, forms: Callable[[], Undecided]) -> None:
    for_ada, for_bob = forms(), forms()
    refuse(for_bob, "Bob keeps the champion: too curt")
    with pytest.raises(AnswerTooLate, match="Bob keeps the champion: too curt"):
        promote_approved(for_ada, ADA)
    assert site.registry.alias(CHAMPION) == "1"


def test_a_night_that_was_overtaken_while_the_form_was_open_is_not_promoted(
    site: Site, forms: Callable[[], Undecided]
) -> None:
    form, book = forms(), NightBook(site.home)
    book.save(book.load(NIGHT).model_copy(update={"night": "q-0003", "index": 3, "verdict": "FAIL"}))
    with pytest.raises(AnswerTooLate, match="night q-0003 was judged since"):
        promote_approved(form, ADA)
    assert site.registry.alias(CHAMPION) == "1"


def test_an_approval_lifts_no_ban(site: Site, forms: Callable[[], Undecided]) -> None:
    """Promoted by force on another way, and rolled back: the night itself has heard of neither."""
    form = forms()
    promote(site, "2", judged_against="1", force=EVE)
    rollback(site, why="it rambles")
    with pytest.raises(BannedVersion, match="it rambles"):
        promote_approved(form, ADA)
    assert (site.registry.alias(CHAMPION), list(site.journal.banned_versions(site.model))) == ("1", ["2"])


def test_a_no_is_too_late_for_a_champion(site: Site, forms: Callable[[], Undecided]) -> None:
    """The process that promoted died before it could write that down."""
    form = forms()
    promote(site, "2", judged_against="1", force=ADA)
    with pytest.raises(AnswerTooLate, match="version 2 is champion already"):
        refuse(form, "Bob keeps the champion")
    assert not promote_approved(form, ADA).changed
    assert NightBook(site.home).load(NIGHT).promoted


def test_one_answer_at_a_time(site: Site, forms: Callable[[], Undecided]) -> None:
    form = forms()
    with held_lock(site.home / "approval.lock", "another answer"), pytest.raises(LockHeld, match="another answer"):
        refuse(form, "Bob keeps the champion")
    assert NightBook(site.home).load(NIGHT).reason is None


def test_a_banned_version_is_not_asked_about(site: Site, forms: Callable[[], Undecided], monkeypatch) -> None:
    form = forms()
    monkeypatch.setattr("tasks.approval.site_of", lambda home, chain: site)
    asked = undecided_night(site.home)
    assert asked is not None
    assert asked.version == form.version
    promote(site, "2", judged_against="1", force=EVE)
    rollback(site, why="it rambles")
    assert undecided_night(site.home) is None

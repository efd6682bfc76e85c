"""A person promotes a registered version: by the gate's word, or by force with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tasks.approval import undecided_night
from tasks.night_state import NightBook
from tasks.promote_by_hand import promote_by_hand
from tasks.promotion import Force, promote
from tasks.registry import CHAMPION, PREVIOUS, Version
from tasks.registry_errors import BannedVersion, PromotionError, PromotionRaced, StoredBytesDiffer
from tasks.rollback import rollback
from tasks.site import Site
from tasks.version_tags import FORCED, JUDGED_AGAINST, VERDICT
from tests.stored_nights import keep_undecided

Register = Callable[..., Version]
FORCE = Force("Ada", "read thirty answers")


def judged(site: Site, register: Register, seed: int, verdict: str, against: str) -> str:
    number = register(seed).number
    site.registry.tag(number, {VERDICT: verdict, JUDGED_AGAINST: against})
    return number


def test_what_passed_is_promoted_and_what_failed_is_not(site: Site, register: Register) -> None:
    first = judged(site, register, 1, "PASS", "none")
    assert promote_by_hand(site, first, "Ada").changed
    failed, passed = judged(site, register, 2, "FAIL", first), judged(site, register, 3, "PASS", first)
    with pytest.raises(PromotionError, match="the gate said FAIL of version 2") as refused:
        promote_by_hand(site, failed, "Ada")
    assert "nightjar gate explain night-2" in refused.value.hint
    assert "nightjar promote 2 --force --why" in refused.value.hint
    assert site.registry.alias(CHAMPION) == first
    assert promote_by_hand(site, passed, "Ada").previous == first
    assert not promote_by_hand(site, passed, "Ada").changed
    assert (site.registry.alias(CHAMPION), site.registry.alias(PREVIOUS)) == (passed, first)
    last = site.journal.entries()[-1]
    assert (last.event, last.by, last.forced) == ("verified", "Ada", False)


def test_force_promotes_what_failed_and_is_written_down(site: Site, register: Register) -> None:
    first = judged(site, register, 1, "PASS", "none")
    promote_by_hand(site, first, "Ada")
    failed = judged(site, register, 2, "FAIL", first)
    promote_by_hand(site, failed, "Ada", FORCE)
    assert site.registry.alias(CHAMPION) == failed
    assert site.registry.version(failed).tags[FORCED] == "Ada: read thirty answers"
    last = site.journal.entries()[-1]
    assert (last.event, last.by, last.why, last.forced) == ("verified", "Ada", "read thirty answers", True)


def test_a_banned_version_comes_back_by_force_alone(site: Site, register: Register) -> None:
    first = judged(site, register, 1, "PASS", "none")
    second = judged(site, register, 2, "PASS", first)
    promote_by_hand(site, first, "Ada")
    promote_by_hand(site, second, "Ada")
    rollback(site, why="it rambles")
    with pytest.raises(BannedVersion, match="it rambles") as refused:
        promote_by_hand(site, second, "Ada")
    assert "nightjar promote 2 --force --why" in refused.value.hint
    promote_by_hand(site, second, "Ada", FORCE)
    assert (site.registry.alias(CHAMPION), site.journal.banned_versions(site.model)) == (second, {})


def test_what_was_judged_against_another_champion_needs_force(site: Site, register: Register) -> None:
    first, second = judged(site, register, 1, "PASS", "none"), judged(site, register, 2, "PASS", "none")
    promote_by_hand(site, first, "Ada")
    with pytest.raises(PromotionRaced, match="judged against no champion, but the champion is version 1"):
        promote_by_hand(site, second, "Ada")
    assert promote_by_hand(site, second, "Ada", FORCE).previous == first


def test_force_proves_the_bytes_all_the_same(site: Site, register: Register) -> None:
    first, second = judged(site, register, 1, "PASS", "none"), judged(site, register, 2, "FAIL", "1")
    promote_by_hand(site, first, "Ada")
    with site.stored(site.registry.version(second)) as folder:
        next(folder.rglob("tokenizer.json")).unlink()
    with pytest.raises(StoredBytesDiffer, match=r"tokenizer\.json is missing"):
        promote_by_hand(site, second, "Ada", FORCE)
    with pytest.raises(PromotionError, match=r"has no version '9'"):
        promote_by_hand(site, "9", "Ada", FORCE)
    assert site.registry.alias(CHAMPION) == first


def test_the_night_of_the_version_tells_it_and_waits_for_nobody(
    site: Site, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(site, register(1).number, judged_against=None)
    number = judged(site, register, 2, "INCONCLUSIVE", "1")
    keep_undecided(site.home, "night-2", 2, number)
    monkeypatch.setattr("tasks.approval.site_of", lambda home, chain: site)
    assert undecided_night(site.home) is not None
    promote_by_hand(site, number, "Ada", FORCE)
    night = NightBook(site.home).load("night-2")
    assert (night.promoted, night.reason) == (True, "promoted by Ada: read thirty answers")
    assert undecided_night(site.home) is None

"""Small stages, real everything else: the version is stored, loaded, asked, promoted, asked again, and rolled back."""

from __future__ import annotations

import pytest

from flows.registry_commands import answer, reconcile_now, roll_back
from tasks.last_config import site_of
from tasks.registry import CHAMPION, PREVIOUS

pytestmark = pytest.mark.slow


def test_two_versions_a_rollback_and_the_night_after_it(nights) -> None:
    first = nights.run("data.quickstart.partitions=3")
    assert first.is_completed(), first.message
    second = nights.run("data.quickstart.partitions=3")
    assert second.is_completed(), second.message
    registry = site_of(nights.home).registry
    assert (registry.alias(CHAMPION), registry.alias(PREVIOUS)) == ("2", "1")
    anchors = {registry.version(number).tags["nightjar.reference_sha256"] for number in ("1", "2")}
    assert len(anchors) == 1

    assert isinstance(answer(nights.home, None, "what is 2 + 3?", 8), str)
    assert "version 2 was rolled back to version 1" in roll_back(nights.home, None, "too curt")
    assert registry.alias(CHAMPION) == "1"
    assert "nothing to do" in reconcile_now(nights.home)[0]

    third = nights.run("data.quickstart.partitions=3")
    assert third.is_completed(), third.message
    assert "version 3 is champion" in third.message
    from tasks.night_state import NightBook

    assert NightBook(nights.home).load("fake-0003").champion.version == "1", "warm start from the restored champion"

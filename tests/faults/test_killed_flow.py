"""The process of the night is killed at every moment of its promotion; the next start puts things right and goes on."""

from __future__ import annotations

import signal

import pytest

from tasks.last_config import site_of
from tasks.night_state import NightBook
from tasks.registry import CHAMPION
from tests.faults.night_process import ended, start_night
from tests.faults.soundness import (
    assert_champion_answers,
    assert_next_night_works,
    assert_sound,
    processes_below,
    running_runs,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STAGES = ("validate", "annotate", "ppo", "evaluate")


@pytest.mark.parametrize(
    ("moment", "alias", "reverted"),
    [
        ("before_move", "1", True),
        ("after_move", "2", True),
        ("before_closing", "2", True),
        ("inside_closing", "2", True),
        ("after_closing", "2", False),
    ],
)
def test_killed_in_its_promotion(nights, moment: str, alias: str, reverted: bool) -> None:
    assert nights.run().is_completed()
    status, said = ended(start_night(nights, {"NIGHTJAR_DIE_AT": moment}))
    assert status == -signal.SIGKILL, said[-3000:]
    site = site_of(nights.home)
    assert site.registry.alias(CHAMPION) == alias
    assert [entry.event for entry in site.journal.unfinished()] == (["pending"] if reverted else [])
    assert running_runs(site) != [], "a killed process closes nothing: that is for the next start"
    assert processes_below(nights.home) == []
    assert_champion_answers(nights.home)

    state = nights.run()
    assert state.is_completed(), state.message
    assert "version 2 is champion" in state.message
    assert any("goes on where it stopped" in note for note in nights.heard.notes)
    assert [nights.starts(stage) for stage in STAGES] == [2, 2, 2, 2], "nothing was computed twice"
    assert len(NightBook(nights.home).nights()) == 2
    assert ("reverted" in [entry.event for entry in site.journal.entries()]) == reverted
    torn = int(moment == "inside_closing")
    assert_sound(nights.home, torn_lines=torn)
    assert assert_next_night_works(nights, torn_lines=torn) == "3"

"""What other hands do to a promotion: another champion by hand, changed bytes in the store, a second night at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import champion_change
from tasks.last_config import site_of
from tasks.model_manifest import stored_folder
from tasks.night_state import NightBook
from tasks.promotion import promote
from tasks.registry import CHAMPION, PREVIOUS
from tests.faults.meanwhile import meanwhile, once_waiting, until
from tests.faults.night_process import ended, start_night
from tests.faults.soundness import assert_next_night_works, assert_sound

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def stage_of(nights, index: int, stage: str) -> Path:
    return nights.home / f"runs/fault-{index:04d}/{stage}"


def test_a_promotion_by_hand_during_the_night_stands_and_the_night_judges_again(nights, monkeypatch) -> None:
    assert nights.run().is_completed()
    monkeypatch.setenv("NIGHTJAR_FAKE", "evaluate=worse")
    assert nights.run().name == "Rejected"
    registry = site_of(nights.home).registry

    monkeypatch.setenv("NIGHTJAR_FAKE", "evaluate=wait")
    by_hand = once_waiting(stage_of(nights, 3, "evaluate"), lambda: registry.set_alias(CHAMPION, "2"))
    with meanwhile(by_hand):
        state = nights.run()
    assert state.is_failed()
    assert "judged against version 1, but the champion is version 2 by now" in state.message
    assert registry.alias(CHAMPION) == "2"
    assert_sound(nights.home, by_hand=True)

    monkeypatch.delenv("NIGHTJAR_FAKE")
    state = nights.run()
    assert "version 3 is champion" in state.message
    assert (registry.alias(CHAMPION), registry.alias(PREVIOUS)) == ("3", "2")
    assert_sound(nights.home)
    assert assert_next_night_works(nights) == "4"


def test_bytes_changed_between_upload_and_promotion_never_become_champion(nights, monkeypatch) -> None:
    assert nights.run().is_completed()

    def on_changed_bytes(site, candidate, **how):
        with site.stored(site.registry.version(candidate)) as stored:
            weights = stored_folder(stored, "model") / "model.safetensors"
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
        return promote(site, candidate, **how)

    with monkeypatch.context() as patch:
        patch.setattr(champion_change, "promote", on_changed_bytes)
        state = nights.run()
    assert state.is_failed()
    assert "model.safetensors differs" in state.message
    registry = site_of(nights.home).registry
    assert registry.alias(CHAMPION) == "1"
    assert_sound(nights.home, spoilt=["2"])

    state = nights.run()
    assert "version 3 is champion" in state.message, "the message says: run the night again for a new version"
    assert [nights.starts(stage) for stage in ("validate", "ppo", "evaluate")] == [2, 2, 2]
    assert_sound(nights.home, spoilt=["2"])
    assert assert_next_night_works(nights, spoilt=["2"]) == "4"


def test_two_nights_at_once_in_two_processes(nights) -> None:
    first = start_night(nights, {"NIGHTJAR_FAKE": "evaluate=wait"})
    until((stage_of(nights, 1, "evaluate") / "waiting").exists)
    status, said = ended(start_night(nights))
    (nights.home / "go").touch()
    first_status, first_said = ended(first)
    assert status == 4, said[-3000:]
    assert "another night is running" in said
    assert f"pid {first.pid}" in said
    assert first_status == 0, first_said[-3000:]
    assert len(NightBook(nights.home).nights()) == 1
    assert_sound(nights.home)
    assert assert_next_night_works(nights) == "2"

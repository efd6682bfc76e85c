"""The model's lock, held by somebody else while a night promotes: a failure that is seen, never a night 'skipped'."""

from __future__ import annotations

import pytest

from flows import nightly as nightly_module
from tasks import champion_change
from tasks.locks import held_lock, model_lock_path
from tasks.night_state import NightBook

pytestmark = pytest.mark.usefixtures("light_registry")


def test_a_lock_that_stays_held_fails_the_night_and_repeating_goes_on(nights, monkeypatch) -> None:
    tries = []

    def busy(site, candidate, **how):
        tries.append(candidate)
        with held_lock(model_lock_path(site.home, site.model), "a rollback"), site.locked("promotion"):
            raise AssertionError("the lock is held twice")

    with monkeypatch.context() as held:
        held.setattr(champion_change, "promote", busy)
        at_once = nightly_module.promote_task.with_options(retry_delay_seconds=0)
        held.setattr(nightly_module, "promote_task", at_once)
        state = nights.run("registry.lock_wait_seconds=0")
    assert (state.name, state.is_failed()) == ("Failed", True), state.message
    assert "held by a rollback" in state.message
    assert len(tries) == 4, "waiting can mend it, so it is tried again"
    night = NightBook(nights.home).load("fake-0001")
    assert (night.status, night.verdict, night.promoted) == ("failed", "PASS", False)

    done = nights.run()
    assert done.is_completed(), done.message
    assert nights.starts("ppo") == 1
    assert NightBook(nights.home).load("fake-0001").promoted

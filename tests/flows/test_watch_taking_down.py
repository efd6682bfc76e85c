"""Who puts the previous champion back after a breach: the automation that hears the event, or the watch itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import watch as watch_module
from flows.watch import BREACHED_EVENT, WatchRequest
from tasks.progress import Silent, listening
from tasks.registry_errors import RollbackRefused
from tasks.rollback import Rollback
from tasks.watching import Breach, WatchState

BROKEN = WatchState("4", (Breach("reward", -3.0, "reward is -3, below 0"),), consecutive=3, patience=3)
SITE = SimpleNamespace(model="team-policy", home=Path("/srv/nightjar"))
CONFIG = SimpleNamespace(name="team")


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[dict] = []
        self.rollbacks: list[dict] = []
        self.told: list[str] = []
        self.subjects: list[str] = []
        self.refusal: Exception | None = None
        self.asked: list[tuple[str, str]] = []
        self.automatic = True
        monkeypatch.setattr(watch_module, "emit_event", lambda **event: self.events.append(event))
        monkeypatch.setattr(watch_module, "rollback", self.rollback)
        monkeypatch.setattr(watch_module, "rollback_is_automatic", self.is_automatic)
        monkeypatch.setattr(watch_module, "notify", self.notify)

    def notify(self, blocks, subject: str, body: str) -> list[str]:
        self.subjects.append(subject)
        self.told.append(body)
        return []

    def rollback(self, site, **how) -> Rollback:
        self.rollbacks.append(how)
        if self.refusal is not None:
            raise self.refusal
        return Rollback(True, "4", "3", "version 3 is champion again")

    def is_automatic(self, chain: str, model: str) -> bool:
        self.asked.append((chain, model))
        return self.automatic


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    return World(monkeypatch)


def act(state: WatchState):
    with listening(Silent()):
        return watch_module._act(SITE, CONFIG, state, WatchRequest(home="/srv/nightjar"))


def test_an_automation_that_listens_does_it(world: World) -> None:
    state = act(BROKEN)
    assert (state.name, state.is_failed()) == ("Breached", True)
    (event,) = world.events
    assert event["event"] == BREACHED_EVENT
    assert event["resource"]["prefect.resource.id"] == "nightjar.model.team-policy"
    assert event["payload"] == {
        "why": BROKEN.why, "version": "4", "home": "/srv/nightjar", "chain": "team", "model": "team-policy",
    }  # fmt: skip
    assert (world.rollbacks, world.asked) == ([], [("team", "team-policy")])
    assert "reward is -3" in world.told[0]
    assert world.subjects == ["Nightjar: team-policy breaks its limits"], "the rollback's run tells of the rollback"


def test_without_one_the_watch_does_it_and_the_event_is_there_all_the_same(world: World) -> None:
    world.automatic = False
    state = act(BROKEN)
    assert len(world.events) == 1
    assert world.subjects[1:] == ["Nightjar: team-policy was rolled back"]
    assert "version 3 is champion again" in world.told[1]
    assert "version 3 is champion again" in state.message
    assert world.rollbacks == [{"why": BROKEN.why, "away_from": "4", "by": "watch"}]


def test_a_rollback_that_is_refused_is_told_once(world: World) -> None:
    world.automatic = False
    world.refusal = RollbackRefused("no earlier champion is known to the journal", "promote another version")
    state = act(BROKEN)
    assert (state.name, state.is_failed()) == ("Breached", True)
    assert "the rollback failed, the champion stays" in state.message
    assert world.subjects[1:] == ["Nightjar: rollback failed, the champion stays"]
    assert "promote another version" in world.told[1]


def test_an_event_that_led_to_nothing_is_not_relied_on_again(world: World) -> None:
    """It goes by websocket, which a proxy may swallow: the automation is there, and nothing has heard it."""
    act(BROKEN)
    assert world.rollbacks == []
    act(replace(BROKEN, consecutive=4))
    assert world.rollbacks == [{"why": replace(BROKEN, consecutive=4).why, "away_from": "4", "by": "watch"}]
    assert len(world.events) == 1, "two at the same act would be in each other's way"
    assert world.subjects[-1] == "Nightjar: team-policy was rolled back"


def test_without_a_server_there_is_no_event(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL")
    act(BROKEN)
    assert world.events == []
    assert len(world.rollbacks) == 1


def test_patience_and_kept_limits_take_nobody_down(world: World) -> None:
    early = WatchState("4", BROKEN.breaches, consecutive=2, patience=3)
    assert act(early).name == "Breached"
    assert act(WatchState("4", (), consecutive=0, patience=3)).is_completed()
    assert (world.events, world.rollbacks) == ([], [])

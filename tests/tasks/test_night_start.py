"""From which champion a night begins, and what a rollback changes while the night's process is dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import load_config
from configs.schema.registry import RegistryConfig
from tasks import night_work
from tasks.journal import Entry
from tasks.night_state import FrozenChampion, NightBook, NightState
from tasks.night_work import NightWork
from tasks.progress import Silent, listening
from tasks.site import Site

ROOT = Path(__file__).resolve().parents[2]
CONFIG = load_config(ROOT / "configs/quickstart.yaml")


class Heard(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def champion(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The alias: its last item is champion."""
    alias: list[str] = []
    monkeypatch.setattr(
        night_work, "freeze_champion", lambda site, folder: FrozenChampion(version=alias[-1], digest="d", model="m")
    )
    monkeypatch.setattr(night_work, "ensure_fetched", lambda site, frozen: None)
    monkeypatch.setattr(night_work, "starting_materials", lambda config, home, start, champion, evaluation: start)
    monkeypatch.setattr(night_work, "frozen_evaluation", lambda *of: None)
    return alias


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.open(tmp_path, RegistryConfig())


def begun(site: Site) -> NightWork:
    """The night as whoever comes next finds it."""
    book = NightBook(site.home)
    if not book.names():
        book.save(NightState(night="q-0005", index=5, name="q", config_hash="c", fingerprint="f", started=1.0))
    night = NightWork(CONFIG, book, site, None, book.load("q-0005"))  # type: ignore[arg-type]
    night.freeze()
    return night


def roll_back(site: Site, champion: list[str], taken_down: str, restored: str) -> None:
    for event in ("rollback_pending", "rolled_back"):
        site.journal.write(Entry(event, site.model, "act", taken_down=taken_down, restored=restored))  # type: ignore[arg-type]
    champion.append(restored)


def start_and_measure(night: NightWork) -> tuple[str, str]:
    assert night.state.started_from is not None
    assert night.state.champion is not None
    return night.state.started_from.version, night.state.champion.version


def test_a_night_keeps_its_champion_however_often_it_is_continued(site: Site, champion: list[str]) -> None:
    champion.append("4")
    assert start_and_measure(begun(site)) == ("4", "4")
    champion.append("5")
    assert start_and_measure(begun(site)) == ("4", "4")


def test_a_night_does_not_go_on_from_a_champion_that_was_rolled_back(site: Site, champion: list[str]) -> None:
    champion.append("4")
    begun(site)
    roll_back(site, champion, "4", "3")
    heard = Heard()
    with listening(heard):
        assert start_and_measure(begun(site)) == ("3", "3")
    assert heard.notes == [
        "version 4, from which night q-0005 had begun, was rolled back: the night begins again from version 3"
    ]
    with listening(heard):
        begun(site)
    assert len(heard.notes) == 1, "told once"


def test_what_was_judged_and_promoted_before_is_forgotten_with_it(site: Site, champion: list[str]) -> None:
    champion.append("4")
    begun(site).note(verdict="PASS", version="5", promoted=True)
    roll_back(site, champion, "4", "3")
    state = begun(site).state
    assert (state.verdict, state.version, state.promoted) == (None, None, False)


def test_nor_does_one_that_a_rollback_has_raced(site: Site, champion: list[str]) -> None:
    champion.append("4")
    night = begun(site)
    roll_back(site, champion, "4", "3")
    night.thaw()
    assert start_and_measure(begun(site)) == ("3", "3")


def test_a_race_with_a_sound_start_judges_again_and_trains_nothing_twice(site: Site, champion: list[str]) -> None:
    champion.append("4")
    night = begun(site)
    champion.append("6")
    night.thaw()
    assert start_and_measure(begun(site)) == ("4", "6")


def test_a_banned_version_that_is_champion_again_by_hand_is_started_from(site: Site, champion: list[str]) -> None:
    """What somebody has made champion by hand stands, as everywhere."""
    champion.append("4")
    begun(site)
    roll_back(site, champion, "4", "3")
    champion.append("4")
    assert start_and_measure(begun(site)) == ("4", "4")

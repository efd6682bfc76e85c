"""The watch: patience, one breach is noise, and nothing measured is nothing judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.registry import WatchConfig, WatchLimit
from tasks.append_log import AppendLog
from tasks.journal import Entry, Journal
from tasks.watching import WATCH_LOG, breaches, record_watch
from training.errors import ConfigError

CONFIG = WatchConfig(limits=[WatchLimit(metric="reward", min=0.0, max_drop=0.5), WatchLimit(metric="kl", max=1.0)])
GOOD = {"reward": 1.0, "kl": 0.1}
BAD = {"reward": -0.1, "kl": 2.0}


def test_patience_is_used_up_by_consecutive_breaches_only(tmp_path: Path) -> None:
    told = [record_watch(tmp_path, "m", "3", x, CONFIG) for x in (GOOD, BAD, BAD, GOOD, BAD, BAD, BAD)]
    assert [state.consecutive for state in told] == [0, 1, 2, 0, 1, 2, 3]
    assert [state.must_roll_back for state in told] == [False] * 6 + [True]
    assert told[-1].why == "3 measurement(s) in a row broke the limits: reward is -0.1, below 0; kl is 2, above 1"


def test_another_version_starts_again(tmp_path: Path) -> None:
    for version in ("3", "3", "4"):
        state = record_watch(tmp_path, "m", version, BAD, CONFIG)
    assert state.consecutive == 1
    assert record_watch(tmp_path, "m", "3", BAD, CONFIG).consecutive == 1
    assert record_watch(tmp_path, "other", "3", BAD, CONFIG).consecutive == 1


def put_back(home: Path, version: str, act: str) -> None:
    for event in ("pending", "verified"):
        Journal(home).write(Entry(event, "m", act, previous="1", candidate=version, forced=True))  # type: ignore[arg-type]


def test_a_version_that_a_person_puts_back_starts_again(tmp_path: Path) -> None:
    put_back(tmp_path, "2", "first")
    told = [record_watch(tmp_path, "m", "2", BAD, CONFIG) for _ in range(3)]
    assert told[-1].must_roll_back
    for event in ("rollback_pending", "rolled_back"):
        Journal(tmp_path).write(Entry(event, "m", "down", taken_down="2", restored="1"))  # type: ignore[arg-type]
    put_back(tmp_path, "2", "by Ada")
    assert [record_watch(tmp_path, "m", "2", BAD, CONFIG).consecutive for _ in range(3)] == [1, 2, 3]


def test_an_act_that_was_reverted_ends_no_term(tmp_path: Path) -> None:
    put_back(tmp_path, "2", "first")
    record_watch(tmp_path, "m", "2", BAD, CONFIG)
    for event in ("pending", "reverted"):
        Journal(tmp_path).write(Entry(event, "m", "tried", previous="2", candidate="3"))  # type: ignore[arg-type]
    assert record_watch(tmp_path, "m", "2", BAD, CONFIG).consecutive == 2


def test_measurements_of_before_terms_were_written_down_count(tmp_path: Path) -> None:
    old = {"model": "m", "version": "2", "measured": BAD, "breaches": ["x"], "consecutive": 2}
    AppendLog(tmp_path / WATCH_LOG).append(old)
    put_back(tmp_path, "2", "first")
    assert record_watch(tmp_path, "m", "2", BAD, CONFIG).consecutive == 3


def test_drop_is_measured_from_the_first_measurement_of_this_champion(tmp_path: Path) -> None:
    record_watch(tmp_path, "m", "2", {"reward": 9.0, "kl": 0.0}, CONFIG)
    record_watch(tmp_path, "m", "3", {"reward": 1.0, "kl": 0.0}, CONFIG)
    state = record_watch(tmp_path, "m", "3", {"reward": 0.4, "kl": 0.0}, CONFIG)
    assert state.breaches[0].sentence == "reward is 0.4, more than 0.5 below its first value 1"
    assert record_watch(tmp_path, "m", "3", {"reward": 0.5, "kl": 0.0}, CONFIG).breaches == ()


def test_drop_is_measured_from_the_first_value_that_was_finite(tmp_path: Path) -> None:
    for reward in (float("nan"), 1.0):
        record_watch(tmp_path, "m", "3", {"reward": reward, "kl": 0.0}, CONFIG)
    state = record_watch(tmp_path, "m", "3", {"reward": 0.4, "kl": 0.0}, CONFIG)
    assert state.breaches[0].sentence == "reward is 0.4, more than 0.5 below its first value 1"


def test_a_value_that_is_not_finite_breaks_its_limit(tmp_path: Path) -> None:
    state = record_watch(tmp_path, "m", "3", {"reward": float("nan"), "kl": float("inf")}, CONFIG)
    assert [breach.sentence for breach in state.breaches] == ["reward is not finite", "kl is not finite"]
    assert record_watch(tmp_path, "m", "3", GOOD, CONFIG).consecutive == 0


def test_what_is_not_measured_is_a_mistake_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kl is not measured; there is reward"):
        record_watch(tmp_path, "m", "3", {"reward": 1.0}, CONFIG)
    with pytest.raises(ConfigError, match="nothing to judge"):
        record_watch(tmp_path, "m", "3", GOOD, WatchConfig())
    assert not (tmp_path / "watch.jsonl").exists()


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0, 5))
def test_loosening_a_limit_never_adds_a_breach(value: float, low: float, slack: float) -> None:
    tight, loose = WatchLimit(metric="x", min=low), WatchLimit(metric="x", min=low - slack)
    if not breaches({"x": value}, None, [tight]):
        assert not breaches({"x": value}, None, [loose])

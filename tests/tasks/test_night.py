"""Which night it is: continue, skip or begin; and that only one runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from configs.schema import NightConfig
from tasks.last_config import last_config
from tasks.night import (
    NothingToDo,
    Opened,
    Source,
    caught_up_since,
    is_stale,
    open_night,
    same_snapshot_before,
)
from tasks.night_state import NightBook, NightState, StageNote
from training.errors import ContractError, DataError


def config_of(**data) -> NightConfig:
    content = {
        "data": {"quickstart": {}} | data,
        "models": {"base": "quickstart", "max_prompt_length": 64, "max_response_length": 64},
        "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
    }
    return NightConfig.model_validate(content)


@dataclass
class FakeSource:
    """Data that arrives for the first `partitions` nights."""

    partitions: int = 2
    delivered: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def source(self) -> Source:
        return Source(self.deliver, self.fingerprint)

    def deliver(self, index: int) -> None:
        self.asked.append(index)
        if index <= self.partitions and index not in self.delivered:
            self.delivered.append(index)

    def fingerprint(self) -> str:
        if not self.delivered:
            raise DataError("no such folder")
        return "-".join(str(number) for number in self.delivered)


@pytest.fixture
def book(tmp_path: Path) -> NightBook:
    return NightBook(tmp_path)


def finish(book: NightBook, opened: Opened, status: str = "finished", **fields):
    return book.change(opened.state, status=status, ended=opened.state.started + 1, **fields)


def opened(outcome) -> Opened:
    assert isinstance(outcome, Opened), outcome
    return outcome


def test_nights_count_up_and_each_brings_its_data(book: NightBook) -> None:
    data, config = FakeSource(), config_of()
    first = opened(open_night(book, config, data.source()))
    assert (first.state.night, first.state.index, first.continued) == ("nightjar-0001", 1, False)
    finish(book, first)
    second = opened(open_night(book, config, data.source()))
    assert second.state.index == 2
    assert data.delivered == [1, 2]


def test_no_new_data_is_skipped_and_says_since_when(book: NightBook) -> None:
    data, config = FakeSource(partitions=1), config_of()
    finish(book, opened(open_night(book, config, data.source())))
    outcome = open_night(book, config, data.source())
    assert isinstance(outcome, NothingToDo)
    assert "nightjar-0001" in outcome.reason
    assert len(book.nights()) == 1, "a skipped start is no night"


def test_another_config_or_again_is_a_new_night_without_new_data(book: NightBook) -> None:
    data = FakeSource(partitions=1)
    finish(book, opened(open_night(book, config_of(), data.source())))
    other = opened(open_night(book, config_of(min_rows=17), data.source()))
    finish(book, other)
    assert other.state.index == 2
    assert opened(open_night(book, config_of(min_rows=17), data.source(), again=True)).state.index == 3


def test_killed_night_is_continued_and_brings_no_data(book: NightBook) -> None:
    data, config = FakeSource(), config_of()
    first = opened(open_night(book, config, data.source()))
    again = opened(open_night(book, config, data.source()))
    assert again.continued
    assert again.state.night == first.state.night
    assert data.asked == [1]


def test_failed_night_is_continued_while_its_data_is_the_newest(book: NightBook) -> None:
    data, config = FakeSource(partitions=1), config_of()
    finish(book, opened(open_night(book, config, data.source())), "failed", reason="disk full")
    again = opened(open_night(book, config, data.source()))
    assert again.continued
    assert (again.state.status, again.state.reason) == ("running", None)


def changed(config: NightConfig, **sections: dict[str, object]) -> NightConfig:
    content = config.model_dump(mode="json")
    for name, keys in sections.items():
        content[name] |= keys
    return NightConfig.model_validate(content)


def test_a_night_that_ran_out_of_time_goes_on_with_more_of_it(book: NightBook) -> None:
    data, config = FakeSource(), config_of()
    finish(book, opened(open_night(book, config, data.source())), "failed", reason="raise stage_timeout_minutes")
    more = changed(config, runtime={"stage_timeout_minutes": 5000.0}, registry={"lock_wait_seconds": 99.0})
    assert opened(open_night(book, more, data.source())).continued
    assert not opened(open_night(book, changed(more, ppo={"rounds": 7}), data.source())).continued


def test_new_limits_of_the_watch_are_no_new_night_and_take_effect(book: NightBook) -> None:
    data, config = FakeSource(partitions=1), config_of()
    finish(book, opened(open_night(book, config, data.source())))
    stricter = changed(config, watch={"limits": [{"metric": "reward", "min": 0.5}]})
    assert isinstance(open_night(book, stricter, data.source()), NothingToDo)
    assert last_config(book.home).watch == stricter.watch


def test_failed_night_gives_way_to_new_data(book: NightBook) -> None:
    data, config = FakeSource(partitions=5), config_of()
    finish(book, opened(open_night(book, config, data.source())), "failed")
    data.deliver(9)
    data.delivered.append(9)
    after = opened(open_night(book, config, data.source()))
    assert not after.continued
    assert after.state.index == 2


def test_killed_night_of_another_config_is_closed(book: NightBook) -> None:
    data = FakeSource()
    first = opened(open_night(book, config_of(), data.source()))
    opened(open_night(book, config_of(min_rows=17), data.source()))
    closed = book.load(first.state.night)
    assert closed.status == "failed"
    assert "not continued" in (closed.reason or "")


def test_chains_of_other_names_do_not_count(book: NightBook) -> None:
    data = FakeSource()
    finish(book, opened(open_night(book, config_of(), data.source())))
    other = config_of().model_copy(update={"name": "other"})
    assert opened(open_night(book, other, data.source())).state.night == "other-0001"


def test_a_missing_source_is_told_by_the_new_night(book: NightBook) -> None:
    with pytest.raises(DataError):
        open_night(book, config_of(), Source(lambda index: None, FakeSource().fingerprint))
    assert book.nights() == []


def test_same_rows_in_other_files_are_found_after_validation(book: NightBook) -> None:
    data, config = FakeSource(), config_of()
    finish(book, opened(open_night(book, config, data.source())), snapshot_sha256="s1")
    second = opened(open_night(book, config, data.source())).state
    assert same_snapshot_before(book, second, "s2") is None
    earlier = same_snapshot_before(book, second, "s1")
    assert earlier is not None
    assert earlier.index == 1
    # A skip by snapshot counts as judged, so that the same files are not validated for ever.
    book.change(second, status="skipped", snapshot_sha256="s1")
    assert isinstance(open_night(book, config, Source(lambda index: None, data.fingerprint)), NothingToDo)


def test_state_survives_the_disk_and_a_broken_file_is_named(book: NightBook) -> None:
    state = opened(open_night(book, config_of(), FakeSource().source())).state
    noted = book.note_stage(state, "sft", StageNote(how="done", seconds=1.5, attempts=2, directory="d", key="k"))
    assert book.load(state.night) == noted
    (book.folder(state.night) / "night.json").write_text('{"night": 3}')
    with pytest.raises(ContractError, match=r"night\.json"):
        book.load(state.night)


def test_a_night_that_began_since_has_caught_up(book: NightBook) -> None:
    config = config_of()
    state = opened(open_night(book, config, FakeSource().source())).state
    due, now = state.started - 60.0, state.started + 60.0
    assert caught_up_since(book, config.name, due, now) is None, "it broke off: somebody has to go on with it"
    done = book.change(state, status="finished", ended=now)
    assert caught_up_since(book, config.name, due, now) == done
    assert caught_up_since(book, config.name, now, now + 60.0) is None, "it began before"
    assert caught_up_since(book, config.name, due, state.started - 1.0) is None, "a clock was set back since"
    assert caught_up_since(book, "another-chain", due, now) is None
    book.change(done, status="failed")
    assert caught_up_since(book, config.name, due, now) is None


def test_stale_starts() -> None:
    assert is_stale(scheduled=0.0, now=7 * 3600.0, limit_hours=6.0)
    assert not is_stale(scheduled=0.0, now=5 * 3600.0, limit_hours=6.0)


def test_a_night_dated_in_the_future_neither_hides_a_killed_one_nor_used_up_data(book: NightBook) -> None:
    """The clock was three years ahead during the first night."""
    data, config = FakeSource(partitions=2), config_of()
    first = opened(open_night(book, config, data.source()))
    ahead = book.change(first.state, started=first.state.started + 3 * 365 * 86_400.0)
    finish(book, Opened(ahead, False))
    second = opened(open_night(book, config, data.source()))
    again = opened(open_night(book, config, data.source()))
    assert (again.state.night, again.continued) == (second.state.night, True)
    finish(book, again)
    assert isinstance(open_night(book, config, data.source()), NothingToDo)
    assert [state.index for state in book.nights()] == [1, 2]


def test_nights_of_several_chains_follow_the_clock_as_far_as_their_numbers_let_it(book: NightBook) -> None:
    def save(name: str, index: int, started: float) -> None:
        fields = {"config_hash": "c", "fingerprint": "f", "started": started}
        book.save(NightState(night=f"{name}-{index:04d}", index=index, name=name, **fields))

    for name, index, started in (("a", 1, 9e9), ("a", 2, 20.0), ("b", 1, 10.0), ("b", 2, 30.0), ("a", 3, 40.0)):
        save(name, index, started)
    told = [state.night for state in book.nights()]
    assert told == ["b-0001", "a-0001", "a-0002", "b-0002", "a-0003"]


def test_checkpoints_go_when_a_later_night_begins_and_not_before(book: NightBook) -> None:
    config, data = config_of(), FakeSource()
    first = opened(open_night(book, config, data.source()))
    stage = book.folder(first.state.night) / "ppo"
    for name in ("checkpoints", "good_states", "policy"):
        (stage / name / "step_00000001").mkdir(parents=True)
    (stage / ".checkpoints.spent.tmp" / "step_00000000").mkdir(parents=True)  # of a process that was killed at it
    book.change(first.state, status="failed")
    assert opened(open_night(book, config, data.source())).continued
    assert sorted(folder.name for folder in stage.iterdir())[1:] == ["checkpoints", "good_states", "policy"]

    finish(book, first)
    assert opened(open_night(book, config, data.source())).state.index == 2
    assert [folder.name for folder in stage.iterdir()] == ["policy"]

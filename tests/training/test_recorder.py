"""Metrics of a stage on disk: nothing is dropped, nothing is half read, a rewind forgets what came after."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.training.forks import KILLED, kill_self, run_forked
from training.recorder import PARTS, Recorder, above, metric_series, read_lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def without_time(lines: list[dict]) -> list[dict]:
    assert all(line.pop("time") > 1e9 for line in lines)
    return lines


def test_a_step_is_a_line(file: Path):
    recorder = Recorder(file)
    recorder.record(3, {"loss": 0.5, "steps": 2})
    assert without_time(read_lines(file)) == [{"step": 3, "loss": 0.5, "steps": 2.0}], "not on disk before it is closed"
    recorder.close()


def test_what_is_not_finite_is_flagged_not_dropped(file: Path):
    recorder = Recorder(file)
    recorder.record(1, {"b": math.nan, "a": -math.inf, "c": 1.0})
    assert without_time(read_lines(file)) == [{"step": 1, "a": None, "b": None, "c": 1.0, "nonfinite": ["a", "b"]}]
    for line in file.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_events_and_progress(file: Path):
    recorder = Recorder(file)
    recorder.event("guard", step=2, sentence="é")
    recorder.progress(2, 5, loss=1.0, bad=math.nan)
    assert without_time(read_lines(file)) == [
        {"event": "guard", "step": 2, "sentence": "é"},
        {"event": "progress", "step": 2, "total": 5, "shown": {"loss": 1.0}},
    ]


def test_what_is_not_finite_in_an_event_is_flagged_not_fatal(file: Path):
    """However deep it lies, and whoever made the number: a stage must not end because of what it has to tell."""
    recorder = Recorder(file)
    fields = {"variance": math.inf, "round": 2, "seen": {"b": [1.0, math.nan], "c": "nan"}, "n": np.float64("-inf")}
    recorder.event("round", **fields)
    (line,) = without_time(read_lines(file))
    assert line == {
        "event": "round", "variance": None, "round": 2, "seen": {"b": [1.0, None], "c": "nan"}, "n": None,
        "nonfinite": ["n", "seen.b.1", "variance"],
    }  # fmt: skip
    assert "NaN" not in file.read_text()


def test_a_series_holds_finite_values_of_steps_alone(file: Path):
    recorder = Recorder(file)
    recorder.record(1, {"loss": 2.0})
    recorder.event("guard", step=1, loss=7.0)
    recorder.record(2, {"loss": math.nan})
    recorder.record(3, {"other": 1.0})
    recorder.record(4, {"loss": 1.0})
    assert metric_series(file, "loss") == ([1, 4], [2.0, 1.0])


def test_a_rewind_forgets_what_came_after(file: Path):
    recorder = Recorder(file)
    recorder.record(1, {"loss": 1.0})
    position = recorder.position()
    recorder.record(2, {"loss": 2.0})
    recorder.rewind(position)
    assert recorder.position() == position
    recorder.record(3, {"loss": 3.0})
    assert recorder.position() == file.stat().st_size
    assert [line["step"] for line in read_lines(file)] == [1, 3]


def test_a_second_process_goes_on_where_the_first_was(file: Path):
    """A killed process leaves half a line; the next one rewinds to the checkpoint's place and goes on."""
    first = Recorder(file)
    first.record(1, {"loss": 1.0})
    position = first.position()
    first.record(2, {"loss": 2.0})
    first.close()
    with file.open("ab") as stream:
        stream.write(b'{"step": 3, "lo')
    assert [line["step"] for line in read_lines(file)] == [1, 2]
    second = Recorder(file)
    assert second.position() == file.stat().st_size
    second.rewind(position)
    second.record(2, {"loss": 9.0})
    second.close()
    assert metric_series(file, "loss") == ([1, 2], [1.0, 9.0])


def test_a_position_is_durable(file: Path):
    def work() -> None:
        recorder = Recorder(file)
        recorder.record(1, {"loss": 1.0})
        assert recorder.position() == file.stat().st_size
        kill_self()

    assert run_forked(work) == KILLED
    assert metric_series(file, "loss") == ([1], [1.0])


def test_other_ranks_write_nothing(file: Path):
    recorder = Recorder(file, enabled=False)
    recorder.record(1, {"loss": 1.0})
    recorder.event("x")
    recorder.progress(1, 2)
    assert recorder.position() == 0
    recorder.rewind(0)
    recorder.close()
    assert not file.exists()
    assert read_lines(file) == []


def test_a_phase_without_steps_counts_in_few_lines_and_ends_at_its_total(tmp_path):
    recorder = Recorder(tmp_path / "metrics.jsonl")
    told = recorder.counting("teacher scores", 1_000)
    for done in range(1, 1_001):
        told(done)
    recorder.close()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert (lines[0]["step"], lines[-1]["step"], len(lines)) == (0, 1_000, PARTS + 1)
    assert {(line["event"], line["doing"], line["total"]) for line in lines} == {("progress", "teacher scores", 1_000)}


def test_nothing_to_count_is_no_line(tmp_path):
    recorder = Recorder(tmp_path / "metrics.jsonl")
    recorder.counting("teacher scores", 0)
    recorder.close()
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_counting_goes_on_above():
    seen = []
    above(seen.append, 512)(3)
    assert seen == [515]

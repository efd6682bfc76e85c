"""The words for how far a stage is."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from flows import console
from flows.console import Pace, PlainLines, moved_words


def test_steps_show_numbers_and_phases_say_what_they_do() -> None:
    assert moved_words(128, 600, {"loss": 0.53}, "") == "128/600 loss 0.53"
    assert moved_words(128, 512, {}, "teacher scores") == "teacher scores 128/512"


def test_a_phase_stands_on_the_line_of_its_stage(monkeypatch) -> None:
    monkeypatch.setattr(console, "_PLAIN_SECONDS", 0.0)
    told = StringIO()
    PlainLines(Console(file=told)).stage_moved("distill", 128, 512, {}, "teacher scores")
    assert "distill: teacher scores 128/512" in told.getvalue()


def test_a_plain_line_tells_how_long_its_phase_may_take() -> None:
    pace = Pace()
    assert pace.left(0, 100, "", 10.0) == "", "no speed yet"
    assert pace.left(20, 100, "", 20.0) == ", some 40 s left"
    assert pace.left(21, 1000, "", 30.0) == "", "another total is another phase"
    assert pace.left(31, 1000, "", 60.0) == ", some 48 min left"
    assert pace.left(1000, 1000, "", 90.0) == "", "nothing is left"

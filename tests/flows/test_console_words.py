"""The words for how far a stage is."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from flows import console
from flows.console import PlainLines, moved_words


def test_steps_show_numbers_and_phases_say_what_they_do() -> None:
    assert moved_words(128, 600, {"loss": 0.53}, "") == "128/600 loss 0.53"
    assert moved_words(128, 512, {}, "teacher scores") == "teacher scores 128/512"


def test_a_phase_stands_on_the_line_of_its_stage(monkeypatch) -> None:
    monkeypatch.setattr(console, "_PLAIN_SECONDS", 0.0)
    told = StringIO()
    PlainLines(Console(file=told)).stage_moved("distill", 128, 512, {}, "teacher scores")
    assert "distill: teacher scores 128/512" in told.getvalue()

"""The night's page in a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from flows.summary_view import summary_view
from tasks.guard_lines import GuardLine
from tasks.summary import NightSummary


def shown(*guards: GuardLine) -> str:
    page = NightSummary("n-0001", "promoted", 60.0, (), (), (), "policy", "3", "champion", ("next",), guards)
    console = Console(width=120, record=True, file=StringIO())
    console.print(summary_view(page))
    return " ".join(console.export_text().split())


def test_many_firings_do_not_push_the_verdict_off_the_screen() -> None:
    told = shown(*(GuardLine(step, "kl_ref > 0.2", "warn", f"look {step}.") for step in range(1, 22)))
    assert "the last 12 of 21; all are in summary.md" in told
    assert "look 21." in told
    assert "look 9." not in told
    assert told.index("look 21.") < told.index("promoted")


def test_few_firings_are_all_shown_and_none_are_no_table() -> None:
    told = shown(GuardLine(9, "kl_ref > 0.3", "rolled back", "the state of step 8 is back [sic]"))
    assert "rolled back" in told
    assert "[sic]" in told, "text of data is no markup"
    assert "Guards" not in shown()

"""`nightjar doctor`: findings as a table."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from configs.schema import load_config
from tasks.doctor import examine
from tasks.home import home_of

_STYLES = {"good": "green", "look": "yellow", "bad": "red"}


def doctor_view(config_path: Path | None) -> tuple[Table, bool]:
    """The table, and whether a night can run."""
    config = load_config(config_path) if config_path is not None else None
    findings = examine(home_of(config), config)
    table = Table(title="Nightjar doctor", title_justify="left")
    for column in ("about", "", "in words"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.about, f"[{_STYLES[finding.health]}]{finding.health}[/]", escape(finding.sentence))
    return table, all(finding.health != "bad" for finding in findings)

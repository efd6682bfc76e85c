"""The config that a home was last run with: for commands that are given no YAML."""

from __future__ import annotations

from pathlib import Path

from configs.errors import NightjarError
from configs.schema import NightConfig
from tasks.night_state import NightBook
from tasks.site import Site


def last_config(home: Path) -> NightConfig:
    """The newest night's effective config. Raises NightjarError when the home has seen no night."""
    book = NightBook(home)
    for state in reversed(book.nights()):
        if (book.folder(state.night) / "config.json").is_file():
            return book.config(state.night)
    raise NightjarError(
        f"home {home} has seen no night yet",
        "run one with `nightjar run CONFIG`, or name the right home with --home or NIGHTJAR_HOME",
    )


def site_of(home: Path) -> Site:
    """The registered model of this home, by its last config."""
    return Site.open(home, last_config(home).registry)

"""Where everything of a chain of nights lies."""

from __future__ import annotations

import os
from pathlib import Path

from configs.errors import NightjarError
from configs.schema import NightConfig

VARIABLE = "NIGHTJAR_HOME"
DEFAULT = ".nightjar"


def home_of(config: NightConfig | None = None) -> Path:
    """The config's runtime.home, else NIGHTJAR_HOME, else .nightjar in the working directory. Absolute; not created."""
    configured = config.runtime.home if config is not None else None
    return home_at(configured or os.environ.get(VARIABLE) or DEFAULT)


def home_at(place: str | Path) -> Path:
    """`place` as an absolute path. Raises NightjarError where the system cannot say which one that is."""
    try:
        return Path(place).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # no folder to be in, no right to look, or nobody whose ~ it could be
        raise NightjarError(
            f"home {place} cannot be found: {getattr(error, 'strerror', None) or error}",
            f"name the folder by its absolute path, with --home or {VARIABLE}",
        ) from None

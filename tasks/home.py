"""Where everything of a chain of nights lies."""

from __future__ import annotations

import os
from pathlib import Path

from configs.schema import NightConfig

VARIABLE = "NIGHTJAR_HOME"
DEFAULT = ".nightjar"


def home_of(config: NightConfig | None = None) -> Path:
    """The config's runtime.home, else NIGHTJAR_HOME, else .nightjar in the working directory. Absolute; not created."""
    configured = config.runtime.home if config is not None else None
    return Path(configured or os.environ.get(VARIABLE) or DEFAULT).expanduser().resolve()

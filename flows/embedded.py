"""Prefect without a server: set before Prefect is imported, so that everything of a night lies in its home."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from configs.errors import NightjarError
from tasks.stray_servers import end_strays, sign

SERVER = "PREFECT_API_URL"


def prepare_prefect(home: Path, quiet: bool = True, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set defaults for Prefect in this process; what the user has set stays.

    Without a server the temporary one keeps its database in the home, and one that a killed night has left there is
    ended. `quiet` leaves the screen to Nightjar: the
    console shows only what ends Prefect itself, while run logs still reach the server in full. Raises NightjarError
    when the home cannot be written.
    """
    environment.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    environment.setdefault("DO_NOT_TRACK", "1")
    environment.setdefault("PREFECT_CLI_PROMPT", "false")
    # Two busy cores start the temporary server slowly.
    environment.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    if not environment.get(SERVER):
        environment.setdefault("PREFECT_HOME", str(home / "prefect"))
        # Prefect's own attempt makes no parents, and its server then dies in silence.
        _make_folder(Path(environment["PREFECT_HOME"]))
        end_strays(environment["PREFECT_HOME"])
        sign(environment)
    if quiet:
        environment.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
        environment.setdefault("PREFECT_INTERNAL_LOGGING_LEVEL", "CRITICAL")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NightjarError(
            f"{folder} cannot be made: {error.strerror or error}",
            "set NIGHTJAR_HOME or runtime.home to a folder that can be written",
        ) from None

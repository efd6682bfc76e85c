"""The command line on small stages and the light registry: `python fake_cli.py run CONFIG`.

NIGHTJAR_FAKE_DIE names an act in the registry and a moment, `register_candidate:after` or `promote:before`: the whole
process is then killed there.
"""

from __future__ import annotations

import os
import signal

import pytest
from light_registry import light_registry, small_stages

from flows.cli import main
from tasks import champion_change


def die_in(patch: pytest.MonkeyPatch, act: str, moment: str) -> None:
    """Kill this process right before or after the act."""
    acting = getattr(champion_change, act)

    def dying(*arguments, **named):
        if moment == "after":
            acting(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(champion_change, act, dying)


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    small_stages(patch)
    light_registry(patch)
    if death := os.environ.get("NIGHTJAR_FAKE_DIE"):
        die_in(patch, *death.split(":"))
    main()

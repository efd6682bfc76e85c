"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# No law depends on how busy the machine is. All else is as the active profile has it (in CI: the same examples always).
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")

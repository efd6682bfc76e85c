"""`nightjar` on small stages and the real registry, ready to be killed: see deaths.py."""

from __future__ import annotations

import pytest
from deaths import plant_deaths
from light_registry import small_stages

from flows.cli import main

if __name__ == "__main__":
    planted = pytest.MonkeyPatch()
    small_stages(planted)
    plant_deaths(planted)
    main()

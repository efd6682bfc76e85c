"""The nightly flow on small stages, for a worker that imports it by name."""

from __future__ import annotations

import pytest
from light_registry import small_stages

from flows.nightly import nightly

__all__ = ["nightly"]

small_stages(pytest.MonkeyPatch())

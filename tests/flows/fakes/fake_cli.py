"""The command line on small stages and the light registry: `python fake_cli.py run CONFIG`."""

from __future__ import annotations

import pytest
from light_registry import light_registry, small_stages

from flows.cli import main

if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    small_stages(patch)
    light_registry(patch)
    main()

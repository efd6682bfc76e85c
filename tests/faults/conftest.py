"""Prefect's test server, small stages, and short nights on a real registry."""

from __future__ import annotations

from tests.faults.short_nights import new_home, nights, one_serving_child, serving  # noqa: F401  (fixtures)
from tests.flows.nights import (  # noqa: F401  (fixtures)
    empty_database,
    fake_stages,
    patched,
    prefect_server,
    tiny_model,
)

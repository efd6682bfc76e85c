"""Prefect's test server once a session, and homes whose nights run on the small stages of `fakes/`."""

from __future__ import annotations

from tests.flows.nights import (  # noqa: F401  (fixtures)
    empty_database,
    fake_stages,
    light_registry,
    new_home,
    nights,
    patched,
    prefect_server,
    tiny_model,
)

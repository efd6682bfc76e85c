"""Fixtures: nights as short as they get, on a registry that really stores, loads and asks, with one serving child."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.serving import ServingWorker
from tasks.site import Site
from tests.flows.nights import CONFIG, Nights, new_nights

SHORT = {
    "name": "fault",
    "data": CONFIG["data"] | {"quickstart": {"partitions": 9, "pairs_per_night": 60}},
    # With a ready base and a function for a reward, a night is validate, annotate, ppo and evaluate.
    "sft": {"run": "never"},
    "reward": {"kind": "function", "function": "quickstart"},
    "registry": {"verify_prompts": ["what is 2 + 3?"], "verify_max_new_tokens": 4, "lock_wait_seconds": 5},
    "gates": CONFIG["gates"],
    "runtime": CONFIG["runtime"] | {"lease_seconds": 30},
}


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingWorker]:
    """One real serving child for the session: starting it costs more than everything that it does here."""
    with ServingWorker("set for each home", tmp_path_factory.mktemp("serving"), 900.0) as worker:
        yield worker


@pytest.fixture(scope="module")
def one_serving_child(patched: pytest.MonkeyPatch, serving: ServingWorker) -> None:
    @contextmanager
    def borrowed(site: Site) -> Iterator[ServingWorker]:
        serving.tracking_uri = site.tracking_uri
        yield serving

    patched.setattr(Site, "_new_worker", borrowed)


@pytest.fixture(scope="module")
def new_home(
    tmp_path_factory: pytest.TempPathFactory,
    fake_stages: None,
    one_serving_child: None,
    empty_database: Path,
    tiny_model: Path,
) -> Callable[..., Nights]:
    """Make a home: keyword arguments are config sections laid over the short night's."""

    def make(**sections: dict) -> Nights:
        models = CONFIG["models"] | {"base": str(tiny_model)}
        config = SHORT | {"models": models} | {name: SHORT.get(name, {}) | given for name, given in sections.items()}
        return new_nights(tmp_path_factory.mktemp("fault"), empty_database, config)

    return make


@pytest.fixture
def nights(new_home: Callable[..., Nights]) -> Nights:
    return new_home()

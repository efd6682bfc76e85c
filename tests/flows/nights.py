"""Nights through the real flow on the small stages of `fakes/`: homes, configs, what was heard; for two conftests."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

FAKES = Path(__file__).resolve().parent / "fakes"
if str(FAKES) not in sys.path:
    sys.path.insert(0, str(FAKES))

import light_registry as light_registry_module  # noqa: E402
from tiny_model import write_tiny_model  # noqa: E402

from tasks.progress import Silent, listening  # noqa: E402

CONFIG: dict[str, Any] = {
    "name": "fake",
    "data": {
        "quickstart": {"partitions": 2, "pairs_per_night": 60},
        "evaluation_fraction": 0.2,
        "max_quarantine": 0.5,
        "near_duplicate_threshold": None,
    },
    "models": {"base": "quickstart", "max_prompt_length": 64, "max_response_length": 64},
    "gates": {
        "rules": [
            {"metric": "reward", "direction": "higher", "baseline": "reference", "min_improvement": 0, "min_n": 5}
        ]
    },
    "runtime": {"retries": 1, "threads": 1, "min_free_disk_gb": 0},
}


@pytest.fixture(scope="session", autouse=True)
def prefect_server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=600):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class Heard(Silent):
    """Remembers notes, stage ends and pages."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self.pages: list = []

    def note(self, text):
        self.notes.append(text)

    def stage_ended(self, stage, how, seconds):
        self.ended.append((stage, how))

    def summary(self, summary):
        self.pages.append(summary)


@dataclass
class Nights:
    """A home, and nights run in it through the real flow."""

    home: Path
    config_path: Path
    heard: Heard = field(default_factory=Heard)

    def run(self, *overrides: str, **request):
        from flows.nightly import nightly
        from flows.request import NightRequest

        self.heard = Heard()
        with listening(self.heard):
            wanted = NightRequest(config=str(self.config_path), overrides=overrides, **request)
            return nightly(wanted, return_state=True)

    def starts(self, stage: str) -> int:
        return sum(len(f.read_text().splitlines()) for f in self.home.glob(f"runs/*/{stage}/starts.jsonl"))


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: making them takes longer than a night of small stages."""
    from tasks.mlflow_client import tracking_uri_of
    from tasks.preflight import check_tracking

    home = tmp_path_factory.mktemp("database")
    check_tracking(tracking_uri_of(home, None), 180.0)
    return home / "mlflow.db"


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def fake_stages(patched: pytest.MonkeyPatch, tiny_model: Path) -> None:
    light_registry_module.small_stages(patched)
    patched.setenv("PYTHONPATH", str(FAKES))
    patched.setenv("NIGHTJAR_FAKE_MODEL", str(tiny_model))
    patched.delenv("MLFLOW_TRACKING_URI", raising=False)
    patched.delenv("NIGHTJAR_HOME", raising=False)


def new_nights(folder: Path, database: Path, config: dict[str, Any]) -> Nights:
    """A fresh home below `folder`, with MLflow's tables made and `config` beside it."""
    home = folder / "home"
    home.mkdir(parents=True)
    shutil.copy(database, home / "mlflow.db")
    path = folder / f"{config['name']}.yaml"
    path.write_text(yaml.safe_dump(config | {"runtime": config["runtime"] | {"home": str(home)}}), encoding="utf-8")
    return Nights(home, path)


@pytest.fixture(scope="module")
def new_home(
    tmp_path_factory: pytest.TempPathFactory, fake_stages: None, empty_database: Path
) -> Callable[[], Nights]:
    return lambda: new_nights(tmp_path_factory.mktemp("night"), empty_database, CONFIG)


@pytest.fixture
def nights(new_home: Callable[[], Nights]) -> Nights:
    return new_home()


@pytest.fixture(scope="module")
def light_registry(patched: pytest.MonkeyPatch) -> None:
    light_registry_module.light_registry(patched)

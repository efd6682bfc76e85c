"""One night of the soak, in a forked child: the real night without Prefect around it, and with one fault planted.

Everything between the lock and the champion is the product's: reconcile, small stages in child processes, gate,
registration, promotion, journal, MLflow on SQLite. Prefect's engine is left out because starting it costs more than
such a night.
"""

from __future__ import annotations

import importlib
import os
import random
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deaths import MOMENTS, plant_deaths
from light_registry import small_stages

from flows import nightly as night_flow
from flows.request import NightRequest
from tasks import champion_change, launch, launch_plan
from tasks.journal import JOURNAL
from tasks.last_config import site_of
from tasks.model_manifest import stored_folder
from tasks.promotion import promote
from tasks.registry import CHAMPION, ModelRegistry
from tasks.rollback import rollback
from tasks.serving import ServingWorker
from tasks.site import Site
from tests.faults.soak_serving import SharedServing
from tests.faults.soak_stage import fork_stage
from tests.faults.soundness import sound_versions

EVALUATIONS = {"gate worse": "evaluate=worse", "gate unsure": "evaluate=unsure", "gate nan": "evaluate=nan"}
TRAINERS = {"trainer killed once": "ppo=die_at_2", "trainer killed always": "ppo=die"}
DEATHS = {f"killed {moment.replace('_', ' ')}": moment for moment in MOMENTS}
PRELOADED = (
    "mlflow", "mlflow.artifacts", "mlflow.entities", "mlflow.store.artifact.local_artifact_repo",
    "mlflow.store.model_registry.sqlalchemy_store", "mlflow.store.tracking.sqlalchemy_store", "matplotlib.figure",
    "matplotlib.backends.backend_agg", "nightjar_fakes", "pandas", "requests", "sqlalchemy.dialects.sqlite",
    "tasks.review", "training.data.ingest", "training.evaluation.report",
)  # fmt: skip
"""What a night imports on its way: once here instead of in every child."""
_TASKS = ("reconcile_task", "stage_task", "gate_task", "register_task", "promote_task")


@dataclass(frozen=True)
class Ended:
    """How a night ended: the state's name and message, or the exception that escaped."""

    name: str
    message: str


def prepare(patch: pytest.MonkeyPatch, serving: SharedServing) -> None:
    """Once, before the first fork: small stages, no Prefect, one serving child for all."""
    for name in PRELOADED:
        importlib.import_module(name)
    small_stages(patch)
    plant_deaths(patch)
    for name in _TASKS:
        patch.setattr(night_flow, name, getattr(night_flow, name).fn)
    patch.setattr(launch, "start_child", fork_stage)
    patch.setattr(night_flow, "report_task", lambda summary, run: None)
    patch.setattr(night_flow, "FlowLog", lambda then: then)

    def borrow(site: Site) -> AbstractContextManager[ServingWorker]:
        return serving.borrowed(site)

    patch.setattr(Site, "_new_worker", borrow)


def run_night(config: Path, fault: str, seed: int) -> Ended:
    """Plant the fault in this process and run the night."""
    told = EVALUATIONS.get(fault) or TRAINERS.get(fault) or ("evaluate=wait" if fault == "second night" else "")
    os.environ["NIGHTJAR_FAKE"] = told
    os.environ["NIGHTJAR_DIE_AT"] = DEATHS.get(fault, "")
    if fault == "killed in a checkpoint":
        launch_plan.MODULES["ppo"] = "checkpointing"  # type: ignore[index]
    if fault in BEFORE_PROMOTION:
        _before_promotion(BEFORE_PROMOTION[fault], random.Random(seed))
    if fault == "moved by hand during":
        _moved_during(random.Random(seed))
    try:
        state = night_flow.nightly.fn(NightRequest(config=str(config)))
    except BaseException as error:
        return Ended("escaped", f"{type(error).__name__}: {error}")
    finally:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # the soak's own notes must get through
    return Ended(str(state.name), str(state.message))


def take_down(home: Path, moment: str = "") -> Ended:
    """A breach: roll the champion back, and maybe be killed at that."""
    os.environ["NIGHTJAR_DIE_AT"] = moment
    site = site_of(home)
    try:
        done = rollback(site, why="the soak says so", away_from=site.registry.alias(CHAMPION), by="soak")
    except Exception as error:
        return Ended(type(error).__name__, str(error))
    return Ended("rolled back" if done.changed else "unchanged", done.sentence)


def _before_promotion(act: Callable[[Site, str, random.Random], None], draws: random.Random) -> None:
    def strike(site: Site, candidate: str, **how: Any) -> Any:
        act(site, candidate, draws)
        return promote(site, candidate, **how)

    champion_change.promote = strike  # type: ignore[assignment]


def _moved_during(draws: random.Random) -> None:
    move = ModelRegistry.set_alias

    def move_and_be_overtaken(self: ModelRegistry, alias: str, version: str) -> None:
        move(self, alias, version)
        if alias == CHAMPION:
            move(self, alias, draws.choice(self._sound))  # type: ignore[attr-defined]

    def remember(site: Site, candidate: str, _: random.Random) -> None:
        site.registry._sound = [v for v in sound_versions(site) if v != candidate]  # type: ignore[attr-defined]
        if site.registry._sound:  # type: ignore[attr-defined]
            ModelRegistry.set_alias = move_and_be_overtaken  # type: ignore[method-assign]

    _before_promotion(remember, draws)


def _change_bytes(site: Site, candidate: str, draws: random.Random) -> None:
    with site.stored(site.registry.version(candidate)) as stored:
        weights = stored_folder(stored, "model") / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        weights.write_bytes(content)


def _move_by_hand(site: Site, candidate: str, draws: random.Random) -> None:
    others = [v for v in sound_versions(site) if v not in (candidate, site.registry.alias(CHAMPION))]
    if others:
        site.registry.set_alias(CHAMPION, draws.choice(others))


def _fill_the_disk(site: Site, candidate: str, draws: random.Random) -> None:
    """No file of this process grows beyond the journal's next few bytes; the database is larger than that already."""
    journal = site.home / JOURNAL
    limit = (journal.stat().st_size if journal.exists() else 0) + draws.randrange(400)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


BEFORE_PROMOTION: dict[str, Callable[[Site, str, random.Random], None]] = {
    "bytes changed": _change_bytes,
    "moved by hand before": _move_by_hand,
    "disk full": _fill_the_disk,
}

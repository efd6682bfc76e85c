"""Preparing a cell with the product's own stages: snapshot, base, SFT reference, teacher, student, annotated store."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

from configs.schema import NightConfig
from configs.schema.loading import load_config
from tasks.stages import Materials, NightFacts, spec_of
from tests.benchmarks.alignment.results import Cell
from tests.benchmarks.alignment.variants import REWARDS
from training.__main__ import STAGES
from training.contract import StageSpec, file_ref, read_json, write_json, write_spec
from training.data.ingest import ingest
from training.data.quickstart import deliver
from training.process import run_stage

CONFIG = Path("configs/quickstart.yaml")
REFERENCE_NOISE = 0.1
"""Every share of flipped labels starts from the reference of this one: what differs is the preferences alone."""
SHARED = ("base", "sft")
JUDGES = ("reward", "distill", "annotate")


@dataclass(frozen=True)
class Grid:
    """Where results lie, the config that everything starts from, and the budget of a run in CPU seconds."""

    results: Path
    budget: float
    config: Path = CONFIG
    overrides: tuple[str, ...] = ()

    def folder(self, cell: Cell) -> Path:
        """All of a cell."""
        return self.results / cell.path

    def result_file(self, cell: Cell, variant: str) -> Path:
        """The result of a run."""
        return self.folder(cell) / "runs" / f"{variant}.json"

    def night(self, cell: Cell, overrides: tuple[str, ...] = ()) -> NightConfig:
        """The effective config of a cell under a variant's overrides."""
        own = (f"seed={cell.seed}", f"data.quickstart.flip_share={cell.noise}")
        return load_config(self.config, [*self.overrides, *own, *overrides])


@dataclass(frozen=True)
class Prepared:
    """The materials of a cell with one reward model, where they lie, and what making them took and came to."""

    materials: Materials
    home: Path
    facts: dict[str, float]


def prepare(grid: Grid, cell: Cell, reward: str = "default") -> Prepared:
    """Make what is missing. Stages that are done are found by their key, as on a night."""
    home = grid.folder(cell) / "prepared"
    reference = replace(cell, noise=REFERENCE_NOISE)
    facts: dict[str, float] = {}
    materials = _chain(SHARED, grid.night(reference), grid.folder(reference) / "prepared", Materials(), facts)
    own = replace(materials, snapshot=None)
    return Prepared(_chain(JUDGES, grid.night(cell, REWARDS[reward]), home, own, facts, reward), home / reward, facts)


def _chain(
    stages: tuple[str, ...], config: NightConfig, home: Path, materials: Materials, facts: dict[str, float],
    below: str = "",
) -> Materials:  # fmt: skip
    materials = replace(materials, snapshot=file_ref(_snapshot(home, config)))
    for stage in stages:
        materials = _made(stage, config, home / below, materials, facts)
    return materials


def spec_for(stage: str, config: NightConfig, home: Path, materials: Materials) -> StageSpec:
    """The spec that a night would write; the code's version is left out, so that a grid survives unrelated edits."""
    facts = NightFacts("night-1", 1, home, "", "", config)
    return replace(spec_of(stage, facts, materials), code_version="alignment")


def _snapshot(home: Path, config: NightConfig) -> Path:
    done = home / "snapshot.json"
    if not done.exists():
        assert config.data.quickstart is not None
        deliver(home / "quickstart", 0, config.data.quickstart, config.seed)
        made = ingest(config.data, home / "ingest", seed=config.seed, source_uri=str(home / "quickstart"))
        write_json(done, {"snapshot": str(made.snapshot.uri)})
    return Path(read_json(done)["snapshot"])


def _made(stage: str, config: NightConfig, home: Path, materials: Materials, facts: dict[str, float]) -> Materials:
    directory = home / stage
    write_spec(directory, spec_for(stage, config, home, materials))
    began, file = time.process_time(), directory / "cpu_seconds.json"
    result = run_stage(directory, importlib.import_module(STAGES[stage]).run)
    if not file.exists():
        write_json(file, {"seconds": time.process_time() - began})
    facts[f"{stage}_seconds"] = read_json(file)["seconds"]
    for name in ("accuracy", "accuracy_retained", "student_teacher_kl", "validation_loss"):
        value = result.metrics.get(name)
        if value is not None:
            facts[f"{stage}_{name}"] = value
    return materials.after(stage, result)

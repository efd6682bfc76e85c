"""One PPO run of a cell: the product's own stage, with a loop that stops its clock to be measured between rounds."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.benchmarks.alignment.cells import Grid, Prepared, prepare, spec_for
from tests.benchmarks.alignment.clock import TrainingClock
from tests.benchmarks.alignment.exam import Examiner
from tests.benchmarks.alignment.results import Cell, Point, RunResult
from tests.benchmarks.alignment.variants import Variant
from training.context import StageContext
from training.contract import write_spec
from training.errors import GuardStop, StageError
from training.ppo import stage
from training.ppo.loop import PPOLoop
from training.recorder import Recorder, read_lines

POINTS = 4
"""Looks at a policy within the grid's budget, besides those at both ends."""


@dataclass
class Measurement:
    """Who measures, for how long the run may train, and what was seen."""

    examiner: Examiner
    budget: float
    every: float
    clock: TrainingClock = field(default_factory=TrainingClock)
    points: list[Point] = field(default_factory=list)
    final: Point | None = None


class MeasuredLoop(PPOLoop):
    """The product's loop, and a look at the policy after a round when one is due. What it trains is untouched."""

    def __init__(self, measurement: Measurement, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.measurement = measurement
        self.looks: dict[int, Point] = {}  # by how many rounds the policy has seen

    def run(self) -> None:
        """Train within the budget, then look at the policy that would be handed on."""
        self.measurement.clock.start()
        super().run()
        found, best = self.measurement, self.state.best
        score = best.probe.get("selection_score")
        if best.round in self.looks:
            look = self.looks[best.round]
            found.final = replace(look, seconds=found.clock.seconds, selection=score, fresh=self._fresh())
        else:
            found.final = self._look(score)  # the loop has put the best round's weights in place

    def _begin(self) -> None:
        super()._begin()
        with self.measurement.clock.pause():
            start = self.measurement.examiner.of_reference()
        self.looks[0] = replace(start, seconds=self.measurement.clock.seconds)
        self.measurement.points.append(self.looks[0])

    def _end_round(self) -> None:
        super()._end_round()
        self._after_round()

    def _skip_round(self) -> None:
        super()._skip_round()
        self._after_round()

    def _after_round(self) -> None:
        found, seconds = self.measurement, self.measurement.clock.seconds
        if seconds - found.points[-1].seconds >= found.every and self.state.cursor.applied:
            with self.onlooker.averaged():
                self.looks[self.state.cursor.round] = self._look(None)
            found.points.append(self.looks[self.state.cursor.round])
        if seconds >= found.budget:
            self.state.cursor.round = self.ppo.rounds

    def _look(self, selection: float | None) -> Point:
        found = self.measurement
        seconds = found.clock.seconds
        with found.clock.pause():
            return found.examiner.examine(
                self.state.policy, seconds, self.state.cursor.applied, self._fresh(), selection
            )

    def _fresh(self) -> int:
        return len(self.state.pool.fresh)


def run_variant(grid: Grid, cell: Cell, variant: Variant) -> RunResult:
    """Prepare what is missing and run the variant. A run that the product itself stops keeps what was seen so far."""
    prepared = prepare(grid, cell, variant.reward)
    config = grid.night(cell, variant.overrides)
    measurement = Measurement(Examiner(config, prepared.materials), variant.budget * grid.budget, grid.budget / POINTS)
    folder = grid.folder(cell) / "work" / variant.name
    shutil.rmtree(folder, ignore_errors=True)
    context = _context(folder, config, prepared)
    stopped = None
    try:
        with patch.object(stage, "PPOLoop", lambda *arguments: MeasuredLoop(measurement, *arguments)):
            stage.run(context)
    except (GuardStop, StageError) as error:
        stopped = f"{type(error).__name__}: {error}"
    context.recorder.close()
    rollbacks = sum(line.get("event") == "rollback" for line in read_lines(context.recorder.path))
    shutil.rmtree(folder)
    # A night whose policy stage fails promotes nothing: what is handed on is the reference.
    final = measurement.final or replace(measurement.points[0], seconds=measurement.clock.seconds)
    return RunResult(
        cell.noise, cell.seed, variant.name, measurement.budget, measurement.points, final, stopped, rollbacks,
        prepared.facts,
    )  # fmt: skip


def _context(folder: Path, config: Any, prepared: Prepared) -> StageContext:
    """A stage directory with a store of its own: no run sees another's fresh answers."""
    spec = spec_for("ppo", config, prepared.home, prepared.materials)
    shutil.copytree(spec.params["store"], folder / "store")
    spec = replace(spec, params=dict(spec.params) | {"store": str(folder / "store")})
    write_spec(folder / "ppo", spec)
    return StageContext(folder / "ppo", spec, Recorder(folder / "ppo" / "metrics.jsonl"))

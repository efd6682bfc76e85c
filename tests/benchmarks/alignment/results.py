"""What a run leaves behind: one JSON file, complete or absent, so that a grid goes on where it was interrupted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training.contract import read_json, write_json


@dataclass(frozen=True)
class Cell:
    """One data set: the share of flipped labels and the seed of everything."""

    noise: float
    seed: int

    @property
    def path(self) -> Path:
        """Relative folder of the cell."""
        return Path(f"noise-{round(100 * self.noise)}") / f"seed-{self.seed}"


@dataclass(frozen=True)
class Point:
    """A policy on its way. `gold` and `kl_ref` (nats a token) are measured on frozen prompts that no training sees;
    `proxy` is the run's own reward model in standard deviations; `selection` is what the product itself selects by."""

    seconds: float
    updates: int
    fresh: int
    gold: float
    proxy: float
    kl_ref: float
    kl_ref_sequence: float
    response_length: float
    eos_rate: float
    selection: float | None = None


@dataclass(frozen=True)
class RunResult:
    """A variant in a cell. `points` begin with the reference; `final` is the policy that would be handed on."""

    noise: float
    seed: int
    variant: str
    budget: float
    points: list[Point]
    final: Point
    stopped: str | None = None
    rollbacks: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def write_result(file: Path, result: RunResult) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, asdict(result))


def read_result(file: Path) -> RunResult:
    """What `write_result` wrote."""
    content = read_json(file)
    content["points"] = [Point(**point) for point in content["points"]]
    content["final"] = Point(**content["final"])
    return RunResult(**content)


def read_results(folder: Path) -> list[RunResult]:
    """Every finished run of every cell."""
    return [read_result(file) for file in sorted(folder.glob("noise-*/seed-*/runs/*.json"))]

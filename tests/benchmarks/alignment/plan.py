"""The grid in the order in which it is run: cut anywhere, what is there already says something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.benchmarks.alignment.results import Cell
from tests.benchmarks.alignment.variants import DPO_RATES, GROUPS, dpo_name

DPO = "dpo"
EXTRA = {"reuse": (0.1,), "overoptimise": (0.1,), "filters": (0.25, 0.1)}
"""Groups beside the main comparison, and the noise at which each is asked."""


@dataclass(frozen=True)
class Job:
    """One run, or the runs of all learning rates of DPO, in a cell; `makes` are the names of its results."""

    cell: Cell
    name: str
    makes: tuple[str, ...]
    rates: tuple[float, ...] = ()


def jobs(
    noises: Sequence[float], seeds: Sequence[int], groups: Sequence[str], rates: Sequence[float] = DPO_RATES
) -> Iterator[Job]:
    """Noise by noise, group by group, seed by seed."""
    for noise in noises:
        for group in groups:
            if noise not in EXTRA.get(group, (noise,)):
                continue
            for seed in seeds:
                cell = Cell(noise, seed)
                runs = [Job(cell, variant.name, (variant.name,)) for variant in GROUPS[group]]
                if group == "main":
                    runs.insert(1, Job(cell, DPO, tuple(dpo_name(rate) for rate in rates), tuple(rates)))
                yield from runs


def missing(found: Iterator[Job], exists: Callable[[Cell, str], bool], only: Sequence[str]) -> list[Job]:
    """Jobs without a result yet, of these names (all, when none is given)."""
    return [
        job for job in found if (not only or job.name in only) and not all(exists(job.cell, name) for name in job.makes)
    ]

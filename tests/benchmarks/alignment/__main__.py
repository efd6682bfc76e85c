"""Command line of the alignment benchmark; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.benchmarks.alignment import plan
from tests.benchmarks.alignment.cells import Grid, prepare
from tests.benchmarks.alignment.results import Cell, write_result
from tests.benchmarks.alignment.variants import ALL, DPO_RATES, REWARDS, SCALES, Variant

if TYPE_CHECKING:
    from tests.benchmarks.alignment.dpo import Worker
    from tests.benchmarks.alignment.results import RunResult

BUDGET = 15.0
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "NIGHTJAR_DEVICE": "cpu"
}  # fmt: skip


def main() -> None:
    """Parse and act."""
    options = _options()
    os.environ.update(ONE_THREAD)
    from training.runtime import prepare_torch  # torch reads the number of threads when it is imported

    overrides = (*SCALES[options.scale], *options.set)
    grid = Grid((options.results / options.scale).resolve(), options.budget, overrides=overrides)
    prepare_torch(grid.results)
    {"prepare": _prepare, "run": _run, "report": _report}[options.act](grid, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.alignment")
    parser.add_argument("act", choices=["prepare", "run", "report"])
    parser.add_argument("--results", type=Path, default=Path("build/alignment"))
    parser.add_argument("--scale", choices=sorted(SCALES), default="compact", help="size of the network")
    parser.add_argument("--budget", type=float, default=BUDGET, help="CPU seconds of training a run")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.1, 0.25, 0.0], help="shares of flipped labels")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--groups", nargs="+", default=["main"], choices=["main", *plan.EXTRA])
    parser.add_argument("--only", nargs="+", default=[], help="names of variants, or dpo")
    parser.add_argument("--rates", type=float, nargs="+", default=list(DPO_RATES), help="learning rates of DPO")
    parser.add_argument("--reward", default="default", choices=sorted(REWARDS), help="with prepare")
    parser.add_argument("--set", nargs="+", default=[], help="key=value over the config of every variant")
    parser.add_argument("--try", dest="attempt", nargs="+", help="run one more variant: NAME key=value ...")
    return parser.parse_args()


def _prepare(grid: Grid, options: argparse.Namespace) -> None:
    cells = [Cell(noise, seed) for noise in options.noise for seed in options.seeds]
    with _bar() as bar:
        task = bar.add_task("", total=len(cells))
        for cell in cells:
            bar.update(task, description=f"prepare {cell.path}")
            prepare(grid, cell, options.reward)
            bar.advance(task)


def _run(grid: Grid, options: argparse.Namespace) -> None:
    if options.attempt:
        name, *overrides = options.attempt
        ALL[name] = Variant(name, name, tuple(overrides), options.reward)
        todo = [plan.Job(Cell(n, s), name, (name,)) for n in options.noise for s in options.seeds]
    else:
        todo = list(plan.jobs(options.noise, options.seeds, options.groups, options.rates))
    todo = plan.missing(iter(todo), lambda cell, name: grid.result_file(cell, name).exists(), options.only)
    started: list[Worker] = []
    with _bar() as bar, ExitStack() as workers:
        task = bar.add_task("", total=len(todo))
        for job in todo:
            bar.update(task, description=f"{job.cell.path} {job.name}")
            for result in _results(grid, job, workers, started):
                _keep(grid, result)
            bar.advance(task)


def _results(grid: Grid, job: plan.Job, workers: ExitStack, started: list[Worker]) -> list[RunResult]:
    from tests.benchmarks.alignment.dpo import Worker, ensure_environment, run_rates
    from tests.benchmarks.alignment.ppo_run import run_variant

    if job.name != plan.DPO:
        return [run_variant(grid, job.cell, ALL[job.name])]
    if not started:
        python = ensure_environment(grid.results.parent.parent / "trl-environment")
        started.append(workers.enter_context(Worker(python, grid.results / "dpo.log")))
    return run_rates(grid, job.cell, job.rates, started[0], grid.budget)


def _keep(grid: Grid, result: RunResult) -> None:
    write_result(grid.result_file(Cell(result.noise, result.seed), result.variant), result)
    end = result.final
    name = f"{Cell(result.noise, result.seed).path} {result.variant}"
    print(f"{name}: gold {end.gold:.3f} at KL {end.kl_ref:.3f}, {end.seconds:.0f} s {result.stopped or ''}", flush=True)


def _report(grid: Grid, options: argparse.Namespace) -> None:
    from tests.benchmarks.alignment.report import write_report

    sys.stdout.write(write_report(grid.results, Path("docs/pictures")))


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn())


if __name__ == "__main__":
    main()

"""The alignment benchmark runs, measures outside of its budget, and says only what its results hold."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.alignment import plan
from tests.benchmarks.alignment.clock import TrainingClock
from tests.benchmarks.alignment.curves import frontier, gold_at, interval, needed, within
from tests.benchmarks.alignment.results import Cell, Point, RunResult, read_result, read_results, write_result
from tests.benchmarks.alignment.variants import DPO_RATES, dpo_name

TINY = (
    "data.quickstart.pairs_per_night=160", "data.evaluation_prompts=12", "models.quickstart_hidden_size=32",
    "models.quickstart_layers=2", "sft.epochs=1", "reward.epochs=1", "reward.collapse_loss_gap=-1.0",
    "distill.epochs=1", "distill.max_student_teacher_kl=null", "distill.min_accuracy_retained=null",
    "distill.collapse_loss_gap=-1", "distill.policy_pairs=8", "rollout.prompts_per_round=8",
    "ppo.train_batch_size=16", "ppo.ppo_mini_batch_size=8", "ppo.selection_prompts=6", "guards.kl_probe_prompts=4",
    "guards.rules=[]", "evaluation.prompts=12", "gates.rules=[{metric: reward, min: 0, min_n: 12}]",
)  # fmt: skip
CELL = Cell(0.25, 3)


def point(seconds: float, gold: float, kl: float, **more: float) -> Point:
    """A point with the figures that matter here."""
    return replace(Point(seconds, 10, 0, gold, 0.0, kl, kl, 8.0, 1.0), **more)


CURVE = [point(0, 0.2, 0.0), point(10, 0.6, 0.1, updates=20, fresh=100), point(20, 0.4, 0.2, updates=30, fresh=300)]


def result(variant: str, seed: int, shift: float = 0.0, noise: float = 0.1) -> RunResult:
    """A run whose gold lies `shift` above the curve's."""
    points = [replace(p, gold=p.gold + shift * (p.kl_ref > 0)) for p in CURVE]
    facts = {
        "reward_accuracy": 0.7, "distill_accuracy": 0.69, "distill_student_teacher_kl": 0.01, "sft_seconds": 9.0,
        "reward_seconds": 2.0, "distill_seconds": 1.0, "annotate_seconds": 1.0,
    }  # fmt: skip
    return RunResult(noise, seed, variant, 20.0, points, points[1], facts=facts)


def test_interval_is_student_s() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(4.302652729911275 / math.sqrt(3))  # t(0.975, 2), spread 1
    assert math.isnan(interval([1.0]).low)


def test_a_frontier_never_falls_and_ends_at_the_best() -> None:
    assert frontier(CURVE, [0.05, 0.1, 0.15, 0.3]).tolist() == pytest.approx([0.4, 0.6, 0.6, 0.6])


def test_gold_at_a_kl_is_linear_between_points_and_favours_the_rival_beyond_them() -> None:
    assert gold_at(CURVE, 0.05) == pytest.approx(0.4)
    assert gold_at(CURVE, 0.15) == pytest.approx(0.5)
    assert gold_at(CURVE, 0.5) == 0.6


def test_needed_counts_to_the_first_crossing() -> None:
    assert needed(CURVE, "fresh", 0.4) == pytest.approx(50)
    assert math.isnan(needed(CURVE, "fresh", 0.7))


def test_a_run_is_cut_to_a_smaller_budget_as_it_was_then() -> None:
    long = replace(result("default", 0), budget=20.0, final=replace(CURVE[1], seconds=20.0))
    assert within(long, 20.0) == long
    cut = within(long, 9.0)
    assert [p.seconds for p in cut.points] == [0, 10]
    assert cut.final == CURVE[1]


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "noise-10" / "seed-0" / "runs" / "default.json"
    write_result(file, result("default", 0))
    assert read_result(file) == result("default", 0) == read_results(tmp_path)[0]


def test_the_grid_asks_most_telling_first_and_only_for_what_is_missing() -> None:
    cells = [job.cell for job in plan.jobs([0.1, 0.25], [0, 1], ["main", "reuse"])]
    assert cells[0] == Cell(0.1, 0)
    assert cells[-1] == Cell(0.25, 1)
    todo = plan.missing(plan.jobs([0.1], [0], ["main"]), lambda cell, name: name == "default", [])
    assert "default" not in {job.name for job in todo}
    assert plan.missing(plan.jobs([0.1], [0], ["main"]), lambda cell, name: False, ["dpo"])[0].makes == tuple(
        map(dpo_name, DPO_RATES)
    )


def test_a_paused_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tests.benchmarks.alignment.clock.time.process_time", lambda: now[0])
    clock = TrainingClock()
    now[0] = 103.0
    with clock.pause():
        now[0] = 110.0
    now[0] = 111.0
    assert clock.seconds == 4.0


def test_the_report_compares_the_default_with_dpo_at_its_own_kl(tmp_path: Path) -> None:
    from tests.benchmarks.alignment.report import write_report

    for seed in range(3):
        for name, shift in (("default", 0.1), (dpo_name(DPO_RATES[0]), 0.0), (dpo_name(DPO_RATES[1]), -0.1)):
            found = result(name, seed, shift + 0.01 * seed)
            write_result(tmp_path / found_path(found), found)
    text = write_report(tmp_path, tmp_path / "pictures")
    assert f"| DPO (TRL), learning rate {DPO_RATES[0]:g} (best rate) | 3 |" in text
    assert "(n = 3): +0.100 [+0.100, +0.100] gold against the best rate of DPO" in text
    assert (tmp_path / "pictures" / "alignment-frontier.png").stat().st_size > 10_000


def found_path(found: RunResult) -> Path:
    """Where a grid keeps it."""
    return Cell(found.noise, found.seed).path / "runs" / f"{found.variant}.json"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_grid_runs_the_product_and_can_be_repeated(tmp_path: Path) -> None:
    from tests.benchmarks.alignment.cells import Grid
    from tests.benchmarks.alignment.ppo_run import run_variant
    from tests.benchmarks.alignment.variants import ALL

    grid = Grid(tmp_path, budget=1.0, overrides=TINY)
    for name in ("default", "offline"):
        found = run_variant(grid, CELL, ALL[name])
        write_result(grid.result_file(CELL, name), found)
        assert found.stopped is None
        assert found.points[0].kl_ref == pytest.approx(0.0, abs=1e-6)
        assert [p.seconds for p in found.points] == sorted(p.seconds for p in found.points)
        assert found.points[-1].updates > 0
        assert (found.points[-1].fresh > 0) == (name == "default")
        assert found.final.kl_ref in {p.kl_ref for p in found.points} or found.final.updates > 0
        assert -1.0 <= found.final.gold <= 1.0
        assert found.facts["sft_seconds"] > 0
    assert not (grid.folder(CELL) / "work" / "default").exists()
    assert {run.variant for run in read_results(tmp_path)} == {"default", "offline"}

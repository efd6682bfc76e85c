"""The section of RESULTS.md and its figures, made from the runs' JSON files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.alignment import figures
from tests.benchmarks.alignment.curves import Interval, by_variant, gold_at, interval, needed, within
from tests.benchmarks.alignment.results import RunResult, read_results
from tests.benchmarks.alignment.variants import CHAIN, DPO_RATES, FILTERS, FRESH, REUSE, dpo_name, label_of

Runs = dict[str, dict[int, RunResult]]
NOISES = (0.0, 0.1, 0.25)


def write_report(results: Path, pictures: Path) -> str:
    """Draw the figures and return the tables as Markdown."""
    found = read_results(results)
    budget = min((run.budget for run in found), default=0.0)
    found = [run if run.variant.startswith("over_") else within(run, budget) for run in found]
    figures.draw_frontiers(found, pictures / "alignment-frontier.png")
    figures.draw_overoptimisation(found, pictures / "alignment-overoptimisation.png")
    parts = [_noise_section(by_variant(found, noise), noise) for noise in (0.1, 0.25, 0.0)]
    parts += [_judges(found), _reuse(by_variant(found, 0.1)), *(_filters(by_variant(found, n), n) for n in (0.25, 0.1))]
    return "\n".join(part for part in parts if part)


def _noise_section(runs: Runs, noise: float) -> str:
    if not runs:
        return ""
    lines = [
        f"### {noise:.0%} of the labels flipped", "",
        "| variant | seeds | gold | KL, nats a token | gold minus best DPO, same seed "
        "| updates | fresh samples | CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |", _reference_row(runs),
    ]  # fmt: skip
    best = best_dpo(runs)
    names = [dpo_name(rate) for rate in DPO_RATES] + [v.name for v in (*CHAIN, *FRESH)] + ["default"]
    lines += [_row(runs, name, best) for name in names if name in runs]
    return "\n".join([*lines, "", *_against_dpo(runs, best), ""])


def _reference_row(runs: Runs) -> str:
    starts = {seed: run.points[0].gold for runs_of in runs.values() for seed, run in runs_of.items()}
    return f"| SFT (the reference) | {len(starts)} | {interval(list(starts.values()))} | 0 | | | | |"


def best_dpo(runs: Runs) -> str | None:
    """The learning rate whose mean gold at the end of the budget is highest, over the seeds that tried them all."""
    there = [name for name in map(dpo_name, DPO_RATES) if name in runs]
    if not there:
        return None
    common = set.intersection(*(set(runs[name]) for name in there)) or set(runs[there[0]])
    return max(there, key=lambda name: interval([r.final.gold for s, r in runs[name].items() if s in common]).mean)


def _row(runs: Runs, name: str, best: str | None) -> str:
    of = list(runs[name].values())
    gold, kl = interval([r.final.gold for r in of]), interval([r.final.kl_ref for r in of])
    against = ""
    if best is not None and name != best:
        both = sorted(set(runs[name]) & set(runs[best]))
        against = interval([runs[name][s].final.gold - runs[best][s].final.gold for s in both]).signed()
    mark = " (best rate)" if name == best else ""
    means = [sum(getattr(r.final, a) for r in of) / len(of) for a in ("updates", "fresh", "seconds")]
    return (
        f"| {label_of(name)}{mark} | {len(of)} | {gold} | {kl} | {against} "
        f"| {means[0]:.0f} | {means[1]:.0f} | {means[2]:.0f} |"
    )


def _against_dpo(runs: Runs, best: str | None) -> list[str]:
    """Frontiers in words: gold at a variant's own KL, against what DPO has at that KL."""
    names = ("default", *(v.name for v in FRESH))
    found = [_frontier_sentence(runs, best, name) for name in names if best and name in runs]
    return [line for line in found if line]


def _frontier_sentence(runs: Runs, best: str, name: str) -> str:
    rates = [rate for rate in map(dpo_name, DPO_RATES) if rate in runs]
    of_rate, of_any, gains = [], [], []
    for seed, run in sorted(runs[name].items()):
        rivals = {rate: gold_at(runs[rate][seed].points, run.final.kl_ref) for rate in rates if seed in runs[rate]}
        if best in rivals:
            of_rate.append(run.final.gold - rivals[best])
            of_any.append(run.final.gold - max(rivals.values()))
            gains.append(run.final.gold - run.points[0].gold)
    if not of_rate:
        return ""
    return (
        f"* {label_of(name)}, at its own KL in each seed (n = {len(of_rate)}): {interval(of_rate).signed()} gold "
        f"against the best rate of DPO, {interval(of_any).signed()} against whichever rate is best there in that seed; "
        f"least gain over the reference in any seed {min(gains):+.3f}"
    )


def _judges(found: Sequence[RunResult]) -> str:
    rows = []
    for noise in NOISES:
        runs = by_variant(found, noise).get("default", {})
        if runs:
            facts = [run.facts for run in runs.values()]
            columns = [
                interval([f[name] for f in facts])
                for name in ("reward_accuracy", "distill_accuracy", "distill_student_teacher_kl")
            ]
            spent = sum(sum(v for k, v in f.items() if k.endswith("_seconds")) for f in facts) / len(facts)
            judge = sum(sum(f[f"{s}_seconds"] for s in ("reward", "distill", "annotate")) for f in facts) / len(facts)
            rows.append(f"| {noise:.0%} | {columns[0]} | {columns[1]} | {columns[2]} | {spent:.0f} | {judge:.0f} |")
    if not rows:
        return ""
    head = [
        "### What the reward models know", "",
        "| flipped | teacher's accuracy on held-out pairs | student's | student-teacher KL | CPU s of all preparation "
        "| of it reward models and annotation |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    return "\n".join([*head, *rows, ""])


def _reuse(runs: Runs) -> str:
    if "once" not in runs:
        return ""
    rows = _savings(runs, "once", [*(v.name for v in REUSE), "default"], "fresh")
    head = [
        "### Does using samples again save samples? (10 % flipped)", "",
        "Target: the gold where `each fresh sample used once` ends in that seed.", "",
        "| variant | seeds that reach it | fresh samples to get there | saved |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    return "\n".join([*head, *rows, ""])


def _filters(runs: Runs, noise: float) -> str:
    names = ["fresh", "filtered", *(v.name for v in FILTERS)]
    if "fresh" not in runs or "fresh_power" not in runs:
        return ""
    head = [
        f"### Does filtering save updates? ({noise:.0%} flipped)", "",
        "Target: the gold where fresh samples without a filter end in that seed.", "",
        "| variant | seeds that reach it | updates to get there | saved |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    return "\n".join([*head, *_savings(runs, "fresh", names, "updates"), ""])


def _savings(runs: Runs, baseline: str, names: Sequence[str], axis: str) -> list[str]:
    rows = []
    for name in names:
        if name not in runs:
            continue
        taken: list[float] = []
        saved: list[float] = []
        seeds = sorted(set(runs[name]) & set(runs[baseline]))
        for seed in seeds:
            target = runs[baseline][seed].points[-1].gold
            own = needed(runs[baseline][seed].points, axis, target)
            here = needed(runs[name][seed].points, axis, target)
            if not math.isnan(here):
                taken.append(here)
                saved.append(1.0 - here / own)
        rows.append(
            f"| {label_of(name)} | {len(taken)} of {len(seeds)} | {interval(taken)} | {_percent(interval(saved))} |"
        )
    return rows


def _percent(found: Interval) -> str:
    if found.n < 2:
        return f"{found.mean:.0%}" if found.n else ""
    return f"{found.mean:+.0%} [{found.low:+.0%}, {found.high:+.0%}]"

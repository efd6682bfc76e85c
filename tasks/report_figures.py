"""The numbers of a night for people: each with its 95 % interval where it has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from training.contract import StageResult
from training.evaluation.report_records import Estimate, EvaluationReport, MetricReport

CONFIDENCE = 0.95
REWARDS = {"gold_reward": "gold reward", "reward": "reward"}
BESIDE = ("win_rate", "kl_ref", "perplexity", "length_ratio", "eos_rate")


@dataclass(frozen=True)
class Figure:
    """One number for people, with its interval in words where it has one. `compared`: a Comparison says it as well."""

    name: str
    value: str
    compared: bool = False


@dataclass(frozen=True)
class Comparison:
    """One metric of new policy, champion and reference, and the differences to them; empty where not measured."""

    name: str
    new: str
    champion: str
    reference: str
    over_champion: str
    over_reference: str


def reward_model_figures(results: Mapping[str, StageResult]) -> list[Figure]:
    """How well the reward models do on held-out pairs, and how often guards rolled back."""
    figures = []
    if "reward" in results:
        figures.append(Figure("teacher accuracy on held-out pairs", _plain(results["reward"].metrics.get("accuracy"))))
    if "distill" in results:
        metrics = results["distill"].metrics
        figures.append(Figure("student accuracy on held-out pairs", _plain(metrics.get("accuracy"))))
        nats = f"{_plain(metrics.get('student_teacher_kl'))} nats"
        figures.append(Figure("student-teacher KL on held-out pairs", nats))
    if "ppo" in results and results["ppo"].metrics.get("rollbacks"):
        figures.append(Figure("rollbacks by guards", f"{results['ppo'].metrics['rollbacks']:.0f}"))
    return figures


def report_figures(report: EvaluationReport) -> list[Figure]:
    """One line a number: rewards of the three models and their differences, then what else decides."""
    figures = []
    for name, shown in REWARDS.items():
        metric = report.metric(name)
        if metric is not None:
            figures += _three_models(metric, shown)
    for name in BESIDE:
        metric = report.metric(name)
        if metric is not None:
            unit = f" {metric.unit}" if metric.unit else ""
            figures.append(Figure(name.replace("_", " "), with_interval(metric.overall.challenger) + unit, True))
    return figures


def _three_models(metric: MetricReport, shown: str) -> list[Figure]:
    measured = metric.overall
    lines = [
        ("reference", measured.reference, ""),
        ("champion", measured.champion, ""),
        ("new policy", measured.challenger, ""),
        ("new policy minus reference", measured.versus_reference, "+"),
        ("new policy minus champion", measured.versus_champion, "+"),
    ]
    return [
        Figure(f"{shown}, {what}", with_interval(estimate, sign), True)
        for what, estimate, sign in lines
        if estimate is not None
    ]


def comparisons(report: EvaluationReport) -> list[Comparison]:
    """The same numbers as a table of models, a line a metric."""
    wanted = REWARDS | {name: name.replace("_", " ") for name in BESIDE}
    found = [(shown, report.metric(name)) for name, shown in wanted.items()]
    return [_comparison(shown, metric) for shown, metric in found if metric is not None]


def _comparison(shown: str, metric: MetricReport) -> Comparison:
    measured = metric.overall
    return Comparison(
        name=f"{shown}, {metric.unit}" if metric.unit else shown,
        new=with_interval(measured.challenger),
        champion=_or_nothing(measured.champion),
        reference=_or_nothing(measured.reference),
        over_champion=_or_nothing(measured.versus_champion, "+"),
        over_reference=_or_nothing(measured.versus_reference, "+"),
    )


def _or_nothing(estimate: Estimate | None, sign: str = "") -> str:
    return "" if estimate is None else with_interval(estimate, sign)


def with_interval(estimate: Estimate, sign: str = "") -> str:
    """`0.62 [0.58, 0.66]`, the 95 % interval where there is one."""
    interval = estimate.interval(CONFIDENCE)
    value = format(estimate.value, f"{sign}.3f")
    if interval is None:
        return value
    return f"{value} [{format(interval.low, f'{sign}.3f')}, {format(interval.high, f'{sign}.3f')}]"


def _plain(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"

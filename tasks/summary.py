"""A night on one page: stages with seconds, figures, every gate sentence, the version, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.schema import NightConfig
from tasks.guard_lines import GuardLine, guard_lines
from tasks.night_state import NightState
from training.contract import StageResult
from training.evaluation.decision import GateDecision
from training.evaluation.report_records import Estimate, EvaluationReport, MetricReport

CONFIDENCE = 0.95


@dataclass(frozen=True)
class StageLine:
    """One stage: seconds of wall clock in this night, and how it came about."""

    stage: str
    seconds: float
    how: str


@dataclass(frozen=True)
class Figure:
    """One number for people, with its interval in words where it has one."""

    name: str
    value: str


@dataclass(frozen=True)
class GateLine:
    """One rule of the gate."""

    label: str
    verdict: str
    severity: str
    sentence: str


@dataclass(frozen=True)
class NightSummary:
    """What the last screen of a night shows, and the Prefect artifact, and the note in MLflow."""

    night: str
    headline: str
    seconds: float
    stages: tuple[StageLine, ...]
    figures: tuple[Figure, ...]
    gate: tuple[GateLine, ...]
    model: str
    version: str | None
    alias: str | None
    next_steps: tuple[str, ...]
    guards: tuple[GuardLine, ...] = ()

    def markdown(self) -> str:
        """The page as markdown."""
        alias = f" (`{self.alias}`)" if self.alias else ""
        version = f"version **{self.version}** of `{self.model}`{alias}" if self.version else "nothing"
        parts = [
            f"# Night {self.night}",
            f"**{self.headline}**",
            f"Registered: {version}. {self.seconds:.0f} s in all.",
            _table("Gate", ("rule", "verdict", "in words"), [(g.label, g.verdict, g.sentence) for g in self.gate]),
            _table("Figures", ("figure", "value"), [(f.name, f.value) for f in self.figures]),
            _table("Guards", ("step", "rule", "action", "in words"), [_cells(line) for line in self.guards]),
            _table("Stages", ("stage", "seconds", ""), [(s.stage, f"{s.seconds:.1f}", s.how) for s in self.stages]),
            "\n".join(f"* {step}" for step in self.next_steps),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


def summarise(
    state: NightState,
    config: NightConfig,
    results: Mapping[str, StageResult],
    report: EvaluationReport | None = None,
    decision: GateDecision | None = None,
) -> NightSummary:
    """Put the page together from what the night has by now; a night that failed early has a short one."""
    alias = "champion" if state.promoted else "challenger"
    return NightSummary(
        night=state.night,
        headline=_headline(state, decision),
        seconds=state.seconds,
        stages=tuple(StageLine(name, note.seconds, note.how) for name, note in state.stages.items()),
        figures=(*_reward_model_figures(results), *(_report_figures(report) if report is not None else ())),
        gate=tuple(GateLine(r.label, r.verdict, r.severity, r.sentence) for r in decision.rules) if decision else (),
        model=config.registry.model,
        version=state.version,
        alias=alias if state.version else None,
        next_steps=_next_steps(config, state),
        guards=_guards(state),
    )


def _guards(state: NightState) -> tuple[GuardLine, ...]:
    note = state.stages.get("ppo")
    return guard_lines(Path(note.directory)) if note is not None and note.directory else ()


def _cells(line: GuardLine) -> tuple[str, ...]:
    return str(line.step), line.rule, line.action, line.sentence


def _headline(state: NightState, decision: GateDecision | None) -> str:
    if state.status == "failed":
        return f"failed: {state.reason or 'no reason is noted'}"
    if decision is None:
        return state.reason or state.status
    told = decision.sentence
    if state.promoted and not decision.promote:
        return f"promoted by a person's force although: {told}"
    return told if state.reason is None else f"{told} {state.reason}"


def _next_steps(config: NightConfig, state: NightState) -> tuple[str, ...]:
    model = config.registry.model
    steps = ["nightjar ui    opens MLflow with this night's run, curves and answers old beside new"]
    if state.promoted:
        steps.append(f'nightjar generate --model "models:/{model}@champion" "..."    asks the new champion')
        steps.append('nightjar rollback --why "..."    puts the previous version back')
    elif state.verdict is not None:
        steps.append(f"nightjar gate explain {state.night}    tells the decision again")
    return tuple(steps)


def _reward_model_figures(results: Mapping[str, StageResult]) -> list[Figure]:
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


def _report_figures(report: EvaluationReport) -> list[Figure]:
    figures = []
    for name, shown in (("gold_reward", "gold reward"), ("reward", "reward")):
        metric = report.metric(name)
        if metric is not None:
            figures += _three_models(metric, shown)
    for name in ("win_rate", "kl_ref", "perplexity", "length_ratio", "eos_rate"):
        metric = report.metric(name)
        if metric is not None:
            unit = f" {metric.unit}" if metric.unit else ""
            figures.append(Figure(name.replace("_", " "), with_interval(metric.overall.challenger) + unit))
    return figures


def _three_models(metric: MetricReport, shown: str) -> list[Figure]:
    measured = metric.overall
    figures = []
    if measured.reference is not None:
        figures.append(Figure(f"{shown}, reference", with_interval(measured.reference)))
    if measured.champion is not None:
        figures.append(Figure(f"{shown}, champion", with_interval(measured.champion)))
    figures.append(Figure(f"{shown}, new policy", with_interval(measured.challenger)))
    if measured.versus_reference is not None:
        figures.append(Figure(f"{shown}, new policy minus reference", with_interval(measured.versus_reference, "+")))
    if measured.versus_champion is not None:
        figures.append(Figure(f"{shown}, new policy minus champion", with_interval(measured.versus_champion, "+")))
    return figures


def with_interval(estimate: Estimate, sign: str = "") -> str:
    """`0.62 [0.58, 0.66]`, the 95 % interval where there is one."""
    interval = estimate.interval(CONFIDENCE)
    value = format(estimate.value, f"{sign}.3f")
    if interval is None:
        return value
    return f"{value} [{format(interval.low, f'{sign}.3f')}, {format(interval.high, f'{sign}.3f')}]"


def _plain(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)

"""A night on one page: stages with seconds, figures, every gate sentence, the version, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.schema import NightConfig
from tasks.act_runs import GATE, PROMOTE, REGISTER
from tasks.guard_lines import GuardLine, guard_lines
from tasks.headline import headline
from tasks.night_state import NightState
from tasks.report_figures import Comparison, Figure, comparisons, report_figures, reward_model_figures
from tasks.stages import SHAPES
from training.contract import StageResult
from training.evaluation.decision import GateDecision, RuleOutcome
from training.evaluation.gate_sentences import most_urgent_first
from training.evaluation.report_records import EvaluationReport, SampleAnswer

_ORDER = (*SHAPES, GATE, REGISTER, PROMOTE)


@dataclass(frozen=True)
class StageLine:
    """One stage: seconds of wall clock in this night, how it came about, and at which attempt."""

    stage: str
    seconds: float
    how: str
    attempts: int = 1

    @property
    def words(self) -> str:
        """`done`, or `done, 2 attempts` when a child died on the way."""
        return f"{self.how}, {self.attempts} attempts" if self.attempts > 1 else self.how


@dataclass(frozen=True)
class GateLine:
    """One rule of the gate."""

    label: str
    verdict: str
    severity: str
    sentence: str


@dataclass(frozen=True)
class AnswerLine:
    """One prompt with the old answer (the champion's, or the reference's on the first night) and the new one."""

    prompt: str
    old: str
    new: str
    old_reward: float | None
    new_reward: float | None


@dataclass(frozen=True)
class NightSummary:
    """What the last screen of a night shows, and the Prefect artifacts, and the note in MLflow."""

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
    comparisons: tuple[Comparison, ...] = ()
    answers: tuple[AnswerLine, ...] = ()
    old: str = "champion"

    def rows(self) -> list[dict[str, str]]:
        """The whole page as one table: what the terminal shows at the end, a row a line."""
        rows = [_row("verdict", f"night {self.night}", "", self.headline)]
        rows += [_row("stage", line.stage, f"{line.seconds:.1f} s", line.words) for line in self.stages]
        rows.append(_row("stage", "whole night", f"{self.seconds:.1f} s", ""))
        rows += [_row("figure", figure.name, figure.value, "") for figure in self.figures]
        rows += [_row("gate", line.label, line.verdict, line.sentence) for line in self.gate]
        rows += [_row("guard", line.rule, line.action, f"step {line.step}: {line.sentence}") for line in self.guards]
        if self.version:
            rows.append(_row("registered", self.model, f"version {self.version}", f"alias {self.alias}"))
        commands = [step.partition("    ") for step in self.next_steps]
        return rows + [_row("next", command, "", words.strip()) for command, _, words in commands]


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
        headline=headline(state, decision),
        seconds=state.seconds,
        stages=tuple(
            StageLine(name, note.seconds, note.how, note.attempts)
            for name, note in sorted((state.stages | state.acts).items(), key=_place)
        ),
        figures=(*(report_figures(report) if report is not None else ()), *reward_model_figures(results)),
        gate=tuple(map(_gate_line, most_urgent_first(decision.rules))) if decision else (),
        model=config.registry.model,
        version=state.version,
        alias=alias if state.version else None,
        next_steps=_next_steps(config, state),
        guards=_guards(state),
        comparisons=tuple(comparisons(report)) if report is not None else (),
        answers=tuple(map(_answer_line, report.samples)) if report is not None else (),
        old="champion" if report is None or report.champion is not None else "reference",
    )


def _place(named: tuple[str, object]) -> int:
    """As the night goes: the record on disk is in alphabetical order."""
    return _ORDER.index(named[0]) if named[0] in _ORDER else len(_ORDER)


def _guards(state: NightState) -> tuple[GuardLine, ...]:
    note = state.stages.get("ppo")
    return guard_lines(Path(note.directory)) if note is not None and note.directory else ()


def _gate_line(rule: RuleOutcome) -> GateLine:
    return GateLine(rule.label, rule.verdict, rule.severity, rule.sentence)


def _answer_line(sample: SampleAnswer) -> AnswerLine:
    has_champion = sample.champion is not None
    old = sample.champion if has_champion else sample.reference
    old_reward = sample.champion_reward if has_champion else sample.reference_reward
    return AnswerLine(sample.prompt, old or "", sample.challenger, old_reward, sample.challenger_reward)


def _next_steps(config: NightConfig, state: NightState) -> tuple[str, ...]:
    model = config.registry.model
    steps = ["nightjar ui    opens MLflow with this night's run, curves and answers old beside new"]
    if state.promoted:
        steps.append(f'nightjar generate --model "models:/{model}@champion" "..."    asks the new champion')
        if state.champion is not None:
            steps.append('nightjar rollback --why "..."    puts the previous version back')
    elif state.verdict is not None:
        steps.append(f"nightjar gate explain {state.night}    tells the decision again")
    return tuple(steps)


def _row(part: str, what: str, value: str, words: str) -> dict[str, str]:
    return {"part": part, "what": what, "value": value, "in words": words}

"""Every metric that a config can name, in one place: what the evaluation report, PPO's steps and the watch hold.

A rule on anything else could never be met, and a night would find out at its end. Tests hold these lists against what
real runs write.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema.gates import GateRule
    from configs.schema.night import NightConfig


@dataclass(frozen=True)
class ReportMetric:
    """A metric of the evaluation report. Example: ReportMetric("win_rate", compared=False).

    compared: champion and reference are measured as well, so that there is a change to hold limits against.
    sliced: there is a value for every slice of the prompts.
    """

    name: str
    compared: bool = True
    sliced: bool = True


REPORT_METRICS = (
    ReportMetric("reward"),
    ReportMetric("teacher_reward"),
    ReportMetric("gold_reward"),
    ReportMetric("win_rate", compared=False),
    ReportMetric("win_rate_reference", compared=False),
    ReportMetric("kl_ref"),
    ReportMetric("kl_ref_sequence"),
    ReportMetric("response_length"),
    ReportMetric("length_ratio", compared=False),
    ReportMetric("eos_rate"),
    ReportMetric("distinct_2"),
    ReportMetric("repetition_share"),
    ReportMetric("train_validation_gap", compared=False, sliced=False),
    ReportMetric("perplexity", sliced=False),
    ReportMetric("reward_model_accuracy", compared=False, sliced=False),
)
SLICE_DIMENSIONS = ("source", "category", "length")
LENGTH_SLICES = ("short", "medium", "long")

STEP_METRICS = (
    "loss", "policy_loss", "actor_loss", "value_loss", "approx_kl", "clip_frac", "clip_frac_lower",
    "value_clip_frac", "entropy", "ratio_mean", "ratio_gap", "ratio_gap_max", "kl_ref_offpolicy", "grad_norm",
    "critic_grad_norm", "learning_rate", "critic_learning_rate", "explained_variance", "tokens_per_second",
    "applied", "kl_coef", "reward_mean", "reward_raw_mean", "reward_clip_frac", "reward_kl", "advantage_variance",
    "kl_behavior", "kl_behavior_estimated", "fresh_share", "value_mean", "effective_sample_fraction",
    "importance_weight_mean", "kl_ref", "kl_ref_sequence", "heldout_reward", "response_length",
    "response_length/mean", "response_length/max", "eos_rate", "perplexity",
)  # fmt: skip
"""What PPO records at some step: what guards may watch."""
BASELINE_METRICS = (
    "kl_ref", "kl_ref_sequence", "heldout_reward", "response_length", "eos_rate", "reward_clip_frac", "perplexity",
)  # fmt: skip
"""What PPO measures before its first step as well."""


def report_names(config: NightConfig) -> tuple[str, ...]:
    """Metrics that the evaluation of a night reports under this config, with a champion and with held-out pairs."""
    absent = _absent(config)
    return tuple(metric.name for metric in REPORT_METRICS if metric.name not in absent)


def watch_names(config: NightConfig) -> tuple[str, ...]:
    """Metrics of a watch's measurement: the champion stands alone there, and the teacher is not loaded."""
    absent = _absent(config) | _ABSENT_IN_A_WATCH
    return tuple(metric.name for metric in REPORT_METRICS if metric.name not in absent)


def metric_problems(config: NightConfig) -> list[str]:
    """One line for each rule that names what is not measured: the key, what is wrong, what to write."""
    return [*_gate_problems(config), *_guard_problems(config), *_watch_problems(config)]


_ABSENT_IN_A_WATCH = {
    "win_rate": "a watch measures the champion alone; write win_rate_reference",
    "teacher_reward": "a watch scores with the student alone; write reward",
}


def _absent(config: NightConfig) -> dict[str, str]:
    """Metrics that this config leaves unmeasured, each with the way out."""
    found: dict[str, str] = {}
    if config.evaluation.gold_function is None:
        found["gold_reward"] = "the truth is only known to a function; set evaluation.gold_function, or write reward"
    if config.reward.kind == "function":
        found["teacher_reward"] = "reward.kind is function, so there is no teacher; write reward"
        found["reward_model_accuracy"] = "reward.kind is function, so there is no reward model; remove the rule"
    if config.data.validation_fraction == 0.0:
        for name in ("perplexity", "reward_model_accuracy"):
            found[name] = "data.validation_fraction is 0, so no text is held out for it; raise it, or remove the rule"
    return found


def _gate_problems(config: NightConfig) -> Iterator[str]:
    absent = _absent(config)
    for index, rule in enumerate(config.gates.rules):
        key = f"gates.rules[{index}]"
        said = _unmeasured(rule.metric, report_names(config), absent, "the evaluation report")
        if said is not None:
            yield f"{key}.metric: {said}"
            continue
        yield from (f"{key}{said}" for said in _misused(rule, next(m for m in REPORT_METRICS if m.name == rule.metric)))
        yield from (f"{key}{said}" for said in _never_judged(rule, config))


def _never_judged(rule: GateRule, config: NightConfig) -> Iterator[str]:
    """What a rule waits for in vain: on every night, or on the first one, which then never makes a champion."""
    most, keys = _samples(rule.metric, config)
    if most is not None and rule.min_n > most:
        yield (
            f".min_n: {rule.min_n} samples of {rule.metric!r} are needed, and there are at most {most} ({keys}), so "
            f"that it fails every night; write min_n: {most} or less, or raise {keys}"
        )
    if most is not None and rule.slices and rule.min_slice_n > most:
        yield (
            f".min_slice_n: {rule.min_slice_n} samples of a slice are needed, and there are at most {most} in all "
            f"({keys}); write less, or raise {keys}"
        )
    if rule.metric == "win_rate" and not rule.needs_champion:
        yield (
            ".needs_champion: 'win_rate' compares with the champion, so that the rule fails the first night, which has "
            "none; write needs_champion: true, or the metric win_rate_reference"
        )


def _samples(metric: str, config: NightConfig) -> tuple[int | None, str]:
    """The most samples that the metric can rest on, and the key that says so; None where only the data say."""
    if metric == "perplexity":
        return config.evaluation.perplexity_rows, "evaluation.perplexity_rows"
    if metric == "reward_model_accuracy":
        return config.data.max_validation_rows, "data.max_validation_rows"
    frozen, asked = config.data.evaluation_prompts, config.evaluation.prompts
    return min(frozen, asked), "data.evaluation_prompts" if frozen < asked else "evaluation.prompts"


def _misused(rule: GateRule, metric: ReportMetric) -> Iterator[str]:
    """What a rule asks of a metric that has it not."""
    if rule.compares and not metric.compared:
        limit = "min_improvement" if rule.min_improvement is not None else "max_regression"
        whole = _listed(m.name for m in REPORT_METRICS if m.compared)
        yield f".{limit}: {metric.name!r} is not measured on the {rule.baseline}; write min or max, or one of {whole}"
    if rule.slices and not metric.sliced:
        whole = _listed(m.name for m in REPORT_METRICS if m.sliced)
        yield f".slices: {metric.name!r} has no slices; remove them, or write one of {whole}"
        return
    for place, name in enumerate(rule.slices):
        dimension, _, value = name.partition("=")
        if dimension not in SLICE_DIMENSIONS:
            yield f".slices[{place}]: no slices by {dimension!r}{_guess(dimension, SLICE_DIMENSIONS)}"
        elif dimension == "length" and value not in (*LENGTH_SLICES, "*"):
            yield f".slices[{place}]: no length {value!r}{_guess(value, (*LENGTH_SLICES, '*'))}"


def _guard_problems(config: NightConfig) -> Iterator[str]:
    labels = [rule.label for rule in config.guards.rules]
    for index, label in enumerate(labels):
        if (first := labels.index(label)) < index:
            yield (
                f"guards.rules[{index}].name: reports would call it {label!r}, as they call guards.rules[{first}]; "
                "write a name of its own"
            )
    for index, rule in enumerate(config.guards.rules):
        key = f"guards.rules[{index}]"
        said = _unmeasured(rule.metric, STEP_METRICS, {}, "PPO's steps")
        if said is not None:
            yield f"{key}.metric: {said}"
        elif rule.needs_baseline and rule.metric not in BASELINE_METRICS:
            yield (
                f"{key}.relative_to: {rule.metric!r} is not measured before the first step; write running_median, "
                f"or watch one of {_listed(BASELINE_METRICS)}"
            )


def _watch_problems(config: NightConfig) -> Iterator[str]:
    absent = _absent(config) | _ABSENT_IN_A_WATCH
    for index, limit in enumerate(config.watch.limits):
        said = _unmeasured(limit.metric, watch_names(config), absent, "a watch's measurement")
        if said is not None:
            yield f"watch.limits[{index}].metric: {said}"


def _unmeasured(name: str, known: Sequence[str], absent: dict[str, str], whose: str) -> str | None:
    if name in known:
        return None
    if name in absent:
        return f"{name!r} is not measured here: {absent[name]}"
    return f"{name!r} is no metric of {whose}{_guess(name, known)}"


def _guess(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    words = " or ".join(f"`{guess}`" for guess in close)
    return f"; did you mean {words}? There is {_listed(known)}" if close else f"; write one of {_listed(known)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))

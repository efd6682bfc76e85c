"""A rule on a metric that nobody measures is refused when the config is read: the key, the likely name, the way out.

That the lists are those of real runs is held where the runs are: test_loop.py for PPO, test_evaluate_stage.py for the
report and the watch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import NightConfig, load_config
from configs.schema.metric_names import REPORT_METRICS, STEP_METRICS, metric_problems, report_names, watch_names
from tests.configs.written import refusal, written

SOUND = {"metric": "reward", "min": 0.0}


def gates(rule: dict) -> dict:
    return {"gates": {"rules": [SOUND, {"name": "tested"} | rule]}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (gates({"metric": "rewrad", "max": 1.0}), "gates.rules[1].metric: 'rewrad' is no metric of the evaluation"),
        (gates({"metric": "perplexitty", "max": 9.0}), "did you mean `perplexity`"),
        (gates({"metric": "accuracy", "min": 0.5}), "reward_model_accuracy"),
        (gates({"metric": "gold_reward", "min": 0.5}), "set evaluation.gold_function"),
        ({"guards": {"rules": [{"metric": "kl_reff", "threshold": 0.3}]}}, "guards.rules[0].metric: 'kl_reff' is no"),
        ({"guards": {"rules": [{"metric": "kl_reff", "threshold": 0.3}]}}, "did you mean `kl_ref`"),
        ({"guards": {"rules": [{"metric": "win_rate", "threshold": 0.3}]}}, "no metric of PPO's steps"),
        ({"guards": {"rules": [{"metric": "loss", "threshold": 2.0, "relative_to": "baseline"}]}},
         "guards.rules[0].relative_to: 'loss' is not measured before the first step; write running_median"),
        ({"guards": {"rules": [{"metric": "kl_ref", "threshold": 0.3}, {"metric": "loss", "op": "nonfinite"},
                               {"metric": "kl_ref", "threshold": 0.3, "patience": 3, "action": "stop"}]}},
         "guards.rules[2].name: reports would call it 'kl_ref > 0.3', as they call guards.rules[0]; write a name of"),
        ({"watch": {"limits": [{"metric": "kl_reff", "max": 0.3}]}}, "watch.limits[0].metric: 'kl_reff' is no metric"),
        ({"watch": {"limits": [{"metric": "win_rate", "min": 0.3}]}}, "write win_rate_reference"),
        ({"watch": {"limits": [{"metric": "teacher_reward", "min": 0.3}]}}, "write reward"),
        (gates({"metric": "perplexity", "max": 9.0}) | {"data": {"source": "x", "validation_fraction": 0}},
         "data.validation_fraction is 0"),
        (gates({"metric": "teacher_reward", "min": 0.0}) | {"reward": {"kind": "function", "function": "gsm8k"}},
         "there is no teacher"),
    ],
)  # fmt: skip
def test_a_metric_that_nobody_measures(tmp_path: Path, sections: dict, words: str) -> None:
    told = refusal(written(tmp_path, **sections))
    assert words in told
    assert "nothing has run" in told


COMPARING = {"direction": "higher", "max_regression": 0.1}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"metric": "win_rate"} | COMPARING, "gates.rules[1].max_regression: 'win_rate' is not measured on the champ"),
        ({"metric": "length_ratio", "direction": "lower", "baseline": "reference", "min_improvement": 0},
         "gates.rules[1].min_improvement: 'length_ratio' is not measured on the reference"),
        ({"metric": "perplexity", "max": 9.0, "slices": ["length=long"]}, "gates.rules[1].slices: 'perplexity' has no"),
        ({"metric": "reward", "min": 0.0, "slices": ["source=*", "categry=*"]},
         "gates.rules[1].slices[1]: no slices by 'categry'; did you mean `category`"),
        ({"metric": "reward", "min": 0.0, "slices": ["length=tall"]}, "gates.rules[1].slices[0]: no length 'tall'"),
    ],
)  # fmt: skip
def test_a_limit_that_the_metric_cannot_meet(tmp_path: Path, rule: dict, words: str) -> None:
    assert words in refusal(written(tmp_path, **gates(rule)))


@pytest.mark.parametrize(
    ("rule", "sections", "words"),
    [
        ({"metric": "reward", "min": 0.0, "min_n": 65}, {"evaluation": {"prompts": 64}},
         "gates.rules[1].min_n: 65 samples of 'reward' are needed, and there are at most 64 (evaluation.prompts)"),
        ({"metric": "kl_ref", "max": 0.3, "min_n": 65}, {"data": {"source": "x", "evaluation_prompts": 64}},
         "at most 64 (data.evaluation_prompts)"),
        ({"metric": "perplexity", "max": 9.0, "min_n": 17}, {"evaluation": {"perplexity_rows": 16}},
         "at most 16 (evaluation.perplexity_rows)"),
        ({"metric": "reward_model_accuracy", "min": 0.5}, {"data": {"source": "x", "max_validation_rows": 16}},
         "gates.rules[1].min_n: 30 samples"),
        ({"metric": "reward", "min": 0.0, "slices": ["length=*"], "min_slice_n": 65}, {"evaluation": {"prompts": 64}},
         "gates.rules[1].min_slice_n: 65 samples"),
        ({"metric": "win_rate", "min": 0.5}, {}, "gates.rules[1].needs_champion: 'win_rate' compares with the champ"),
    ],
)  # fmt: skip
def test_a_rule_that_waits_in_vain(tmp_path: Path, rule: dict, sections: dict, words: str) -> None:
    assert words in refusal(written(tmp_path, **gates(rule), **sections))
    sound = rule | {"min_n": 16, "min_slice_n": 16, "needs_champion": True}
    load_config(written(tmp_path, **gates(sound), **sections))


def test_everything_is_told_at_once_and_sound_rules_pass(tmp_path: Path) -> None:
    wrong = gates({"metric": "a_b", "min": 0.0}) | {"watch": {"limits": [{"metric": "c_d", "max": 1.0}]}}
    told = refusal(written(tmp_path, **wrong))
    assert "2 problem(s)" in told
    assert "gates.rules[1].metric" in told
    assert "watch.limits[0].metric" in told
    sliced = {"metric": "reward", "min": 0.0, "slices": ["category=sums", "length=*"]}
    load_config(written(tmp_path, **gates(sliced)))


def test_overrides_are_held_to_it_as_well(tmp_path: Path) -> None:
    assert "gates.rules[0].metric" in refusal(written(tmp_path), "gates.rules=[{metric: kl, max: 0.3}]")


def test_every_metric_can_be_named_where_it_is_measured(tmp_path: Path) -> None:
    rules = [{"metric": metric.name, "min": 0.0, "needs_champion": True} for metric in REPORT_METRICS]
    guards = [{"metric": name, "threshold": 0.0} for name in STEP_METRICS]
    config = load_config(
        written(tmp_path, gates={"rules": rules}, guards={"rules": guards}, evaluation={"gold_function": "quickstart"})
    )
    assert set(report_names(config)) == {metric.name for metric in REPORT_METRICS}
    assert set(report_names(config)) - set(watch_names(config)) == {"win_rate", "teacher_reward"}


def test_a_stored_config_is_still_read() -> None:
    """What an older version allowed must not make last year's night unreadable: only loading a file refuses."""
    stored = NightConfig.model_validate(
        {"data": {"source": "d"}, "models": {"base": "m"}} | {"gates": {"rules": [{"metric": "old", "min": 0}]}}
    )
    assert len(metric_problems(stored)) == 1

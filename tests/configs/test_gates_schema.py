"""The gate's rules as config: what is accepted, what is refused and in which words."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
from pydantic import ValidationError

from configs.schema.gates import Amount, GateRule, GatesConfig

TYPICAL = """
epsilon: 1.0e-6
rules:
  - {metric: reward, direction: higher, min_improvement: 0, slices: ["category=*"], min_slice_n: 25}
  - {metric: reward, direction: higher, baseline: reference, min_improvement: 0.05, min_n: 100}
  - {metric: kl_ref, max: 0.1, confidence: 0.9}
  - {metric: perplexity, direction: lower, max_regression: {relative: 0.2, absolute: 1.5}}
  - {metric: win_rate, min: 0.5, needs_champion: true, severity: warn}
  - {name: variety, metric: distinct_2, direction: higher, max_regression: 0.05, severity: dry_run, confidence: null}
"""


def test_a_typical_section():
    gates = GatesConfig.model_validate(yaml.safe_load(TYPICAL))
    assert [rule.label for rule in gates.rules] == [
        "reward_vs_champion", "reward_vs_reference", "kl_ref", "perplexity_vs_champion", "win_rate", "variety",
    ]  # fmt: skip
    assert gates.rules[0].min_improvement == Amount(absolute=0.0)
    assert gates.rules[3].max_regression == Amount(relative=0.2, absolute=1.5)
    assert gates.confidence_levels == (0.9, 0.95)
    assert gates.metrics == ("reward", "kl_ref", "perplexity", "win_rate", "distinct_2")


def test_it_comes_back_from_its_own_dump():
    """Stages receive the section as JSON and read it again."""
    gates = GatesConfig.model_validate(yaml.safe_load(TYPICAL))
    assert GatesConfig.model_validate(gates.model_dump(mode="json")) == gates
    assert GatesConfig.model_validate_json(gates.model_dump_json()) == gates


GOOD = {"metric": "reward", "direction": "higher", "min_improvement": 0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_improvement": None}, "no limit; write min, max, max_regression or min_improvement"),
        ({"direction": None}, "compares with the champion but does not say which way is better; write direction"),
        ({"direction": "up"}, "'higher' or 'lower'"),
        ({"min": 2, "max": 1}, "min 2 is above max 1: nothing passes"),
        ({"min_improvement": None, "min": 0, "baseline": "reference"}, "baseline: reference has no effect"),
        ({"baseline": "yesterday"}, "'champion' or 'reference'"),
        ({"min_improvement": -0.1}, "greater than or equal to 0"),
        ({"max_regression": {"relative": -1}}, "greater than or equal to 0"),
        ({"max_regression": {}}, "an amount needs a number"),
        ({"max_regression": {"percent": 5}}, "Extra inputs"),
        ({"max_regression": True}, "Amount"),
        ({"max_regression": "a lot"}, "valid number"),
        ({"min": float("nan")}, "finite number"),
        ({"max": float("inf")}, "finite number"),
        ({"min_n": 1}, "greater than or equal to 2"),
        ({"min_n": 2.5}, "valid integer"),
        ({"confidence": 0.5}, "greater than 0.5"),
        ({"confidence": 1.0}, "less than 1"),
        ({"confidence": 95}, "less than 1"),
        ({"slices": ["joke"]}, "pattern"),
        ({"slices": ["category="]}, "pattern"),
        ({"slices": ["category=joke", "category=joke"]}, "named twice"),
        ({"severity": "fatal"}, "'block', 'warn' or 'dry_run'"),
        ({"metric": "a metric"}, "pattern"),
        ({"name": "a | b"}, "pattern"),
        ({"threshold": 1}, "Extra inputs"),
    ],
)
def test_nonsense_is_refused_in_words(changes, words):
    GateRule.model_validate(GOOD)
    with pytest.raises(ValidationError, match=words):
        GateRule.model_validate(GOOD | changes)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "no gate rules are configured"),
        ({"rules": []}, "no gate rules are configured"),
        ({"rules": [GOOD | {"severity": "warn"}, GOOD | {"severity": "dry_run"}]}, "no gate rule blocks"),
        ({"rules": [GOOD, GOOD]}, "two gate rules are called 'reward_vs_champion'"),
        ({"rules": [GOOD | {"name": "report"}]}, "'report' is taken"),
        ({"rules": [GOOD], "epsilon": 0}, "greater than 0"),
        ({"rules": [GOOD], "rule": 1}, "Extra inputs"),
    ],
)
def test_a_gate_that_could_not_judge_is_refused(section, words):
    with pytest.raises(ValidationError, match=words):
        GatesConfig.model_validate(section)


def test_a_rule_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        GateRule.model_validate(GOOD).min_n = 5


def test_every_field_is_documented():
    for section in (Amount, GateRule, GatesConfig):
        missing = [name for name, field in section.model_fields.items() if not field.description]
        assert not missing, f"{section.__name__}: no description of {missing}"


def test_it_needs_pydantic_and_yaml_alone():
    blocked = dict.fromkeys(["torch", "numpy", "pandas", "pyarrow", "training", "mlflow", "prefect"])
    code = f"import sys; sys.modules.update({blocked}); import configs.schema.gates"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

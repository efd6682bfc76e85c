"""Guard rules as data: each comparison, reference, window and patience; nothing watches what is not measured."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.guards import GuardRule, GuardsConfig
from training.errors import ConfigError
from training.guards import GuardMonitor

KNOWN = ("kl_ref", "loss", "reward", "response_length")
BASELINES = ("kl_ref", "response_length")


def monitor(*rules: GuardRule | dict[str, Any], baseline: dict[str, float] | None = None) -> GuardMonitor:
    given = [rule if isinstance(rule, GuardRule) else GuardRule(**{"metric": "kl_ref"} | rule) for rule in rules]
    found = GuardMonitor(given, KNOWN, BASELINES)
    if baseline is not None:
        found.set_baseline(baseline)
    return found


def firings(found: GuardMonitor, values: list[float], metric: str = "kl_ref") -> list[int]:
    """Steps (from 0) at which the first rule fired."""
    return [step for step, value in enumerate(values) if found.observe(step, {metric: value})]


@pytest.mark.parametrize(
    ("op", "fires"),
    [(">", [3, 5]), (">=", [2, 3, 5]), ("<", [0, 1, 5]), ("<=", [0, 1, 2, 5])],
)
def test_every_comparison(op: str, fires: list[int]):
    values = [-1.0, 0.29, 0.3, 0.31, 0.3 if op in "><" else (9.0 if "<" in op else -9.0), math.nan]
    assert firings(monitor({"op": op, "threshold": 0.3}), values) == fires


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_needs_no_threshold(value: float):
    found = monitor({"metric": "loss", "op": "nonfinite"})
    assert firings(found, [1.0, value, 2.0], "loss") == [1]
    assert "not finite" in found.fired[0]["sentence"]


@pytest.mark.parametrize("op", [">", ">=", "<", "<="])
@pytest.mark.parametrize("reference", [None, "baseline", "running_median"])
def test_nan_is_never_inside_a_limit(op: str, reference: str | None):
    rule = {"op": op, "threshold": 1.0, "relative_to": reference, "window": 2}
    if reference is None or reference == "baseline":
        rule["window"] = 1
    found = monitor(rule, baseline={"kl_ref": 1.0})
    found.observe(0, {"kl_ref": 1.0})
    found.observe(1, {"kl_ref": 1.0})
    assert found.observe(2, {"kl_ref": math.nan})


def test_relative_to_the_baseline():
    found = monitor({"op": ">", "threshold": 1.2, "relative_to": "baseline"}, baseline={"kl_ref": 10.0})
    assert firings(found, [11.9, 12.0, 12.1]) == [2]
    assert found.fired[0]["sentence"].startswith("kl_ref = 12.1 is > 12")


@pytest.mark.parametrize("begins", [0.0, -0.5, math.nan, math.inf])
def test_a_multiple_of_nothing_is_refused_as_soon_as_it_is_known(begins: float):
    """Such a rule could never fire: the operator is told before the first step, with what to write instead."""
    found = monitor({"op": ">", "threshold": 1.5, "relative_to": "baseline", "name": "far"})
    told = rf"'far'(.|\n)*'kl_ref' is {begins:.4g} before the first step(.|\n)*relative_to"
    with pytest.raises(ConfigError, match=told):
        found.set_baseline({"kl_ref": begins, "response_length": 3.0})


def test_a_baseline_that_was_not_measured_is_refused():
    found = monitor({"op": ">", "threshold": 1.5, "relative_to": "baseline"})
    with pytest.raises(ConfigError, match="'kl_ref' is nan before the first step"):
        found.set_baseline({"response_length": 3.0})


@pytest.mark.parametrize("begins", [math.nan, math.inf])
def test_nothing_lies_above_what_is_not_finite(begins: float):
    found = monitor({"op": ">", "threshold": 0.1, "relative_to": "above_baseline"})
    with pytest.raises(ConfigError, match="is no number to add to"):
        found.set_baseline({"kl_ref": begins})


@pytest.mark.parametrize("begins", [0.0, 0.25])
def test_above_the_baseline(begins: float):
    """The threshold is added: a metric that begins at 0 has a limit too, which a multiple would not give."""
    found = monitor({"op": ">", "threshold": 0.125, "relative_to": "above_baseline"}, baseline={"kl_ref": begins})
    assert firings(found, [begins, begins + 0.125, begins + 0.126, 1.0]) == [2, 3]
    assert found.rules[0].label == "kl_ref > baseline + 0.125"
    assert "(rule 'kl_ref > baseline + 0.125')" in found.fired[0]["sentence"]


def test_above_a_baseline_that_is_not_measured_is_refused():
    with pytest.raises(ConfigError, match="'loss' has no baseline"):
        monitor({"metric": "loss", "threshold": 0.1, "relative_to": "above_baseline"})


def nights(share: float, probe: int, answers: int, rounds: int, sized: bool) -> float:
    """Part of simulated nights with an alarm, on a judge that clips `share` of all answers, always."""
    draws, alarms = np.random.default_rng(20261130), 0
    rule = {"threshold": 0.1, "relative_to": "above_baseline"}
    for _ in range(2_000):
        found = monitor(rule)
        sizes = {"kl_ref": answers} if sized else {}
        found.set_baseline({"kl_ref": draws.binomial(probe, share) / probe}, {"kl_ref": probe} if sized else {})
        seen = draws.binomial(answers, share, rounds) / answers
        alarms += any(found.observe(i, {"kl_ref": value}, sizes) for i, value in enumerate(seen))
    return alarms / 2_000


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize(("probe", "answers", "rounds"), [(12, 24, 3), (64, 320, 7)])
def test_chance_raises_no_alarm_on_a_share(share: float, probe: int, answers: int, rounds: int):
    assert nights(share, probe, answers, rounds, sized=True) < 0.02


def test_without_the_counts_chance_does_raise_alarms():
    assert nights(0.5, 12, 24, 3, sized=False) > 0.4


@pytest.mark.parametrize(("probe", "answers"), [(12, 24), (64, 320)])
@pytest.mark.parametrize("clipped", [0.0, 0.25, 0.5])
def test_a_round_in_which_every_score_is_clipped_stands_out_at_any_time(probe: int, answers: int, clipped: float):
    for before in (0, 1, 6):
        found = monitor({"threshold": 0.1, "relative_to": "above_baseline"})
        found.set_baseline({"kl_ref": clipped}, {"kl_ref": probe})
        usual = [found.observe(i, {"kl_ref": clipped}, {"kl_ref": answers}) for i in range(before)]
        assert not any(usual)
        assert found.observe(before, {"kl_ref": 1.0}, {"kl_ref": answers})


def test_a_quarter_of_a_large_round_stands_out_above_none():
    found = monitor({"threshold": 0.1, "relative_to": "above_baseline"})
    found.set_baseline({"kl_ref": 0.0}, {"kl_ref": 64})
    assert found.observe(1, {"kl_ref": 0.25}, {"kl_ref": 320})


def test_the_counts_outlive_a_checkpoint():
    rule = {"threshold": 0.1, "relative_to": "above_baseline"}
    found, resumed = monitor(rule), monitor(rule)
    found.set_baseline({"kl_ref": 0.5}, {"kl_ref": 12})
    resumed.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert not resumed.observe(1, {"kl_ref": 0.7}, {"kl_ref": 24})
    assert resumed.observe(2, {"kl_ref": 1.0}, {"kl_ref": 24})
    old = {name: value for name, value in found.state_dict().items() if name != "baseline_samples"}
    resumed.load_state_dict(old)
    assert resumed.observe(1, {"kl_ref": 0.7}, {"kl_ref": 24}), "an older checkpoint knows no counts"


def test_relative_to_the_running_median():
    """Twice the median of the last four; nothing to compare with before two are known."""
    found = monitor({"op": ">", "threshold": 2.0, "relative_to": "running_median", "window": 4})
    values = [100.0, 10.0, 10.0, 10.0, 10.0, 10.0, 19.9, 20.1, 30.0]
    expected, history = [], []
    for step, value in enumerate(values):
        recent = history[-4:]
        if len(recent) >= 2 and value > 2 * statistics.median(recent):
            expected.append(step)
        history.append(value)
    assert expected == [7, 8]
    assert firings(found, values) == expected


@given(values=st.lists(st.floats(-5, 5), max_size=20), window=st.integers(1, 5), threshold=st.floats(-3, 3))
def test_a_window_is_a_mean(values, window, threshold):
    found = monitor({"op": ">", "threshold": threshold, "window": window})
    expected = [
        step for step in range(len(values))
        if statistics.fmean(values[max(0, step - window + 1) : step + 1]) > threshold
    ]  # fmt: skip
    assert firings(found, values) == expected


@given(breaches=st.lists(st.booleans(), max_size=30), patience=st.integers(1, 4))
def test_patience_counts_breaches_in_a_row(breaches, patience):
    found = monitor({"op": ">", "threshold": 0.5, "patience": patience})
    expected, run = [], 0
    for step, breach in enumerate(breaches):
        run = run + 1 if breach else 0
        if run == patience:
            expected.append(step)
            run = 0
    assert firings(found, [float(b) for b in breaches]) == expected


def test_a_metric_that_was_not_measured_leaves_its_rule_as_it_was():
    found = monitor({"op": ">", "threshold": 0.5, "patience": 2})
    assert not found.observe(0, {"kl_ref": 1.0})
    assert not found.observe(1, {"loss": 9.0})
    assert found.observe(2, {"kl_ref": 1.0})


def test_rules_fire_each_for_itself_in_their_order():
    found = monitor(
        {"op": ">", "threshold": 0.2, "action": "warn"},
        {"op": ">", "threshold": 0.3, "action": "rollback", "name": "far"},
        {"metric": "loss", "op": "nonfinite", "action": "stop"},
    )  # fmt: skip
    assert [f.index for f in found.observe(1, {"kl_ref": 0.25, "loss": 1.0})] == [0]
    fired = found.observe(2, {"kl_ref": 0.35, "loss": math.inf})
    assert [f.index for f in fired] == [0, 1, 2]
    assert fired[1].sentence == "kl_ref = 0.35 is > 0.3 (rule 'far'): rollback"
    assert [entry["step"] for entry in found.fired] == [1, 2, 2, 2]
    assert (fired[1].value, fired[1].limit, fired[1].step) == (0.35, 0.3, 2)


def test_an_unknown_metric_is_a_configuration_error():
    with pytest.raises(
        ConfigError, match=r"'kl > 0.3' watches 'kl', which this stage does not measure(.|\n)*kl_ref, loss"
    ):
        monitor({"metric": "kl", "op": ">", "threshold": 0.3})


def test_a_baseline_that_is_never_taken_is_a_configuration_error():
    """A rule that can never fire is a silent pass."""
    rule = {"metric": "loss", "op": ">", "threshold": 2.0, "relative_to": "baseline"}
    with pytest.raises(ConfigError, match=r"'loss > 2.0'(.|\n)*no baseline(.|\n)*kl_ref, response_length"):
        monitor(rule)


def test_the_rules_that_users_come_with_are_all_measured():
    from configs.schema.metric_names import BASELINE_METRICS, STEP_METRICS

    GuardMonitor(GuardsConfig().rules, STEP_METRICS, BASELINE_METRICS)


def test_no_two_usual_rules_are_called_alike():
    labels = [rule.label for rule in GuardsConfig().rules]
    assert len(set(labels)) == len(labels)


def test_a_gradient_that_is_not_finite_is_watched_by_default():
    """Its loss may well be finite."""
    watched = {rule.metric for rule in GuardsConfig().rules if rule.op == "nonfinite" and rule.action == "rollback"}
    assert {"loss", "grad_norm", "critic_grad_norm"} <= watched


@given(values=st.lists(st.one_of(st.floats(-2, 2), st.just(math.nan)), max_size=20), cut=st.integers(0, 20))
def test_state_goes_through_json_and_back(values, cut):
    rules = (
        {"op": ">", "threshold": 0.5, "patience": 2}, {"op": "<", "threshold": 0.5, "relative_to": "baseline"},
        {"op": ">", "threshold": 1.5, "relative_to": "running_median", "window": 3},
        {"op": ">", "threshold": 0.1, "window": 4},
    )  # fmt: skip
    straight, first = (monitor(*rules, baseline={"kl_ref": 1.0}) for _ in range(2))
    second = monitor(*rules)
    expected = [[f.index for f in straight.observe(step, {"kl_ref": v})] for step, v in enumerate(values)]
    found = [[f.index for f in first.observe(step, {"kl_ref": v})] for step, v in enumerate(values[:cut])]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [[f.index for f in second.observe(cut + i, {"kl_ref": v})] for i, v in enumerate(values[cut:])]
    assert found == expected
    assert json.dumps(second.state_dict()) == json.dumps(straight.state_dict())


def test_after_a_rollback_the_way_there_is_forgotten_and_the_count_is_not():
    found = monitor({"op": ">", "threshold": 0.5, "patience": 2}, {"op": ">", "threshold": 0.5, "window": 3})
    found.observe(0, {"kl_ref": 5.0})
    found.rollbacks[0] = 1
    found.forget_recent()
    assert not found.observe(1, {"kl_ref": 0.1})
    assert found.rollbacks == [1, 0]
    assert len(found.fired) == 1

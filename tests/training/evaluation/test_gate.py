"""The gate by example: what a person reads, rule kind by rule kind."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from configs.schema.gates import GateRule, GatesConfig
from training.errors import GateError
from training.evaluation.gate import decide, explain


def gate(*rules, **fields):
    return GatesConfig(rules=tuple(GateRule(**rule) for rule in rules), **fields)


def first(decision):
    """Outcome of the first configured rule; the gate's own check of the report stands before it."""
    return decision.rules[1]


OVER_REFERENCE = {"metric": "reward", "direction": "higher", "baseline": "reference", "min_improvement": 0}


def test_the_sentence_says_change_interval_need_and_verdict(one):
    decision = decide(one(challenger=0.56, champion=0.5, reference=0.25), gate(OVER_REFERENCE), True)
    wanted = "reward: +0.31 over the reference, 95 % interval [0.26, 0.36], needs above 0: PASS"
    assert first(decision).sentence == wanted
    assert decision.verdict == "PASS"
    assert decision.promote
    assert decision.sentence == "PASS: 1 of 1 blocking rules hold; the challenger may become champion"


@pytest.mark.parametrize(
    ("rule", "models", "verdict"),
    [
        ({"metric": "kl_ref", "max": 0.1}, {"challenger": 0.05}, "PASS"),
        ({"metric": "kl_ref", "max": 0.1}, {"challenger": 0.08}, "INCONCLUSIVE"),
        ({"metric": "kl_ref", "max": 0.1}, {"challenger": 0.2}, "FAIL"),
        ({"metric": "eos_rate", "min": 0.9}, {"challenger": 0.96}, "PASS"),
        ({"metric": "eos_rate", "min": 0.9}, {"challenger": 0.92}, "INCONCLUSIVE"),
        ({"metric": "eos_rate", "min": 0.9}, {"challenger": 0.8}, "FAIL"),
        ({"metric": "length", "min": 10, "max": 20}, {"challenger": 15.0}, "PASS"),
        ({"metric": "length", "min": 10, "max": 20}, {"challenger": 25.0}, "FAIL"),
        # negative rewards: -2.0 -> -2.1 is worse by 5 % of 2
        ({"metric": "reward", "direction": "higher", "max_regression": {"relative": 0.1}},
         {"challenger": -2.1, "champion": -2.0}, "PASS"),
        ({"metric": "reward", "direction": "higher", "max_regression": {"relative": 0.02}},
         {"challenger": -2.1, "champion": -2.0}, "FAIL"),
        ({"metric": "reward", "direction": "higher", "min_improvement": {"relative": 0.1}},
         {"challenger": -1.7, "champion": -2.0}, "PASS"),
        # a metric where lower is better
        ({"metric": "perplexity", "direction": "lower", "max_regression": 0.2},
         {"challenger": 8.1, "champion": 8.0}, "PASS"),
        ({"metric": "perplexity", "direction": "lower", "max_regression": 0.02},
         {"challenger": 8.1, "champion": 8.0}, "FAIL"),
        ({"metric": "perplexity", "direction": "lower", "min_improvement": 0},
         {"challenger": 7.9, "champion": 8.0}, "PASS"),
        ({"metric": "perplexity", "direction": "lower", "min_improvement": 0},
         {"challenger": 7.98, "champion": 8.0}, "INCONCLUSIVE"),
        # a champion at 0 has no relative change: the absolute amount holds, or else the same number
        ({"metric": "reward", "direction": "higher", "max_regression": {"relative": 0.5, "absolute": 0.2}},
         {"challenger": -0.1, "champion": 0.0}, "PASS"),
        ({"metric": "reward", "direction": "higher", "max_regression": {"relative": 0.5, "absolute": 0.2}},
         {"challenger": -0.3, "champion": 0.0}, "FAIL"),
        ({"metric": "reward", "direction": "higher", "max_regression": {"relative": 0.5}},
         {"challenger": -0.3, "champion": 0.0}, "PASS"),
        # with both amounts the stricter one holds
        ({"metric": "reward", "direction": "higher", "max_regression": {"relative": 0.5, "absolute": 0.2}},
         {"challenger": 9.7, "champion": 10.0}, "FAIL"),
        ({"metric": "reward", "direction": "higher", "min_improvement": {"relative": 0.01, "absolute": 0.2}},
         {"challenger": 10.2, "champion": 10.0}, "INCONCLUSIVE"),
    ],
)  # fmt: skip
def test_every_kind_of_limit(one, rule, models, verdict):
    report = one(name=rule["metric"], **{"champion": 1.0, **models})
    decision = decide(report, gate(rule), True)
    assert first(decision).verdict == verdict
    assert decision.verdict == verdict
    assert f": {verdict}" in first(decision).sentence
    assert decision.promote == (verdict == "PASS")


def test_equal_models_do_not_improve_but_do_not_regress(one):
    same = one(challenger=0.5, champion=0.5, half=0.0)
    assert decide(same, gate({"metric": "reward", "direction": "higher", "min_improvement": 0}), True).verdict == "FAIL"
    assert decide(same, gate({"metric": "reward", "direction": "higher", "max_regression": 0}), True).verdict == "PASS"


def test_a_relative_limit_says_where_it_comes_from(one):
    rule = {"metric": "reward", "direction": "higher", "max_regression": {"relative": 0.1}}
    negative = first(decide(one(challenger=-2.1, champion=-2.0), gate(rule), True))
    assert "needs at least -0.2 (10 % of the champion's 2): PASS" in negative.sentence
    zero = first(decide(one(challenger=0.1, champion=1e-9), gate(rule), True))
    assert "needs at least -0.1 (absolute, because the champion's 1e-09 counts as 0): PASS" in zero.sentence
    assert zero.checks[0].baseline == 1e-9
    assert zero.checks[0].limit == -0.1


def test_inconclusive_waits_for_a_person(one):
    decision = decide(one(challenger=0.28, champion=0.2, reference=0.25), gate(OVER_REFERENCE), True)
    assert decision.verdict == "INCONCLUSIVE"
    assert not decision.promote
    assert "undecided: reward_vs_reference" in decision.sentence
    assert "a person decides where approval is configured, otherwise the champion stays" in decision.sentence
    assert "more prompts" in first(decision).sentence


def test_the_first_night_skips_the_champion_and_must_still_beat_the_reference(one, make):
    rules = gate(
        {"metric": "reward", "direction": "higher", "min_improvement": 0},
        OVER_REFERENCE,
        {"metric": "win_rate", "min": 0.5, "needs_champion": True},
    )
    better = decide(one(challenger=0.56, reference=0.25, has_champion=False), rules, False)
    assert [rule.verdict for rule in better.rules] == ["PASS", "SKIPPED", "PASS", "SKIPPED"]
    assert better.verdict == "PASS"
    assert better.champion is None
    assert "Skipped, because there is no champion yet: reward_vs_champion, win_rate" in better.sentence
    worse = decide(one(challenger=0.16, reference=0.25, has_champion=False), rules, False)
    assert worse.verdict == "FAIL"
    assert worse.sentence.startswith("FAIL: not met: reward_vs_reference; nothing is promoted")


def test_a_first_night_with_nothing_to_judge_promotes_nothing(one):
    rules = gate({"metric": "reward", "direction": "higher", "min_improvement": 0})
    decision = decide(one(challenger=0.5, reference=0.1, has_champion=False), rules, False)
    assert decision.verdict == "FAIL"
    assert "nothing was judged" in decision.sentence
    assert "baseline: reference" in decision.sentence


def test_absolute_limits_of_a_comparing_rule_hold_on_the_first_night(one):
    rules = gate({"metric": "reward", "direction": "higher", "min_improvement": 0, "min": 0.4})
    low = decide(one(challenger=0.2, has_champion=False), rules, False)
    assert low.verdict == "FAIL"
    high = decide(one(challenger=0.5, has_champion=False), rules, False)
    assert high.verdict == "PASS"
    assert "other checks of this rule: 1 SKIPPED" in first(high).sentence


@pytest.mark.parametrize(("severity", "told"), [("warn", "warning"), ("dry_run", "dry run")])
def test_soft_rules_are_told_and_do_not_block(one, severity, told):
    report = one(challenger=0.56, champion=0.5, reference=0.25)
    decision = decide(report, gate(OVER_REFERENCE, {"metric": "reward", "min": 5, "severity": severity}), True)
    assert decision.verdict == "PASS"
    assert f"Told without blocking: reward FAIL ({told})" in decision.sentence
    assert decision.told[0].label == "reward"
    assert not decision.blocking
    assert f"FAIL ({told})" in explain(decision)
    missing = decide(report, gate(OVER_REFERENCE, {"metric": "gold", "min": 5, "severity": severity}), True)
    assert missing.verdict == "PASS"
    assert "gold FAIL" in missing.sentence


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("model", ["challenger", "champion"])
def test_numbers_that_are_not_finite_fail_with_that_reason(make, wrong, model):
    good, bad = make.estimate(0.5), make.estimate(wrong, intervals={})
    measured = make.measurement(0.5, champion=0.4).model_copy(update={model: bad, "versus_champion": bad})
    report = make.report(
        make.metric("reward", measured), make.metric("other", make.measurement(0.5, champion=good.value))
    )
    rule = {"metric": "reward", "direction": "higher", "max_regression": {"relative": 1000.0}}
    decision = decide(report, gate(rule), True)
    assert decision.verdict == "FAIL"
    assert f"reward of the {model} is {wrong}, not a finite number: FAIL" in first(decision).sentence
    # a number that no rule reads makes the report as a whole untrustworthy
    elsewhere = decide(report, gate({"metric": "other", "min": 0}), True)
    assert elsewhere.verdict == "FAIL"
    assert "metrics.reward" in elsewhere.rules[0].sentence


def test_few_samples_fail_and_say_what_to_do(one):
    decision = decide(one(challenger=0.5, champion=0.1, n=29), gate({"metric": "reward", "min": 0}), True)
    assert first(decision).verdict == "FAIL"
    assert "rests on 29 samples, needs at least 30: FAIL; raise evaluation.prompts" in first(decision).sentence


def test_a_missing_metric_names_the_nearest(one):
    decision = decide(one(challenger=0.5, champion=0.1), gate({"metric": "rewards", "min": 0}), True)
    assert (
        first(decision).sentence
        == "rewards: not in the report: FAIL; measure it or correct the rule (did you mean reward?)"
    )


def test_slices_each_hold_the_limit(make):
    parts = {"category=sum": make.measurement(0.9, n=25), "category=joke": make.measurement(0.3, n=25)}
    report = make.report(make.metric("reward", make.measurement(0.6), parts), has_champion=False)

    def judged(*slices, **fields):
        return first(decide(report, gate({"metric": "reward", "min": 0.5, "slices": slices, **fields}), False))

    assert judged("category=sum").verdict == "PASS"
    assert judged("category=joke").sentence.startswith("reward in category=joke: 0.3, 95 % interval")
    assert judged("category=*").verdict == "FAIL"
    assert len(judged("category=*").checks) == 3
    assert "present: category=sum, category=joke" in judged("category=poem").sentence
    assert judged("source=*").verdict == "FAIL"
    assert "rests on 25 samples, needs at least 26" in judged("category=sum", min_slice_n=26).sentence


def test_an_exact_metric_is_judged_by_its_value(make):
    from training.evaluation.report import exact_metric

    report = make.report(exact_metric("accuracy", 0.8, n=500), has_champion=False)
    asked = {"metric": "accuracy", "min": 0.75}
    judged = first(decide(report, gate(asked), False))
    assert judged.verdict == "ERROR"
    assert "confidence: null" in judged.sentence
    bare = first(decide(report, gate({**asked, "confidence": None}), False))
    assert bare.verdict == "PASS"
    assert bare.sentence == "accuracy: 0.8, needs at least 0.75: PASS"


def test_reports_that_contradict_the_question_are_errors(one, make):
    rules = gate({"metric": "reward", "direction": "higher", "max_regression": 1.0})
    with_champion = one(challenger=0.5, champion=0.4)
    flipped = make.measurement(0.5, champion=0.4).model_copy(update={"versus_champion": make.estimate(-0.1)})
    decision = decide(make.report(make.metric("reward", flipped)), rules, True)
    assert decision.verdict == "ERROR"
    assert "not challenger minus champion" in first(decision).sentence
    assert decision.sentence == "ERROR: could not judge: reward_vs_champion; the champion stays"
    unexpected = decide(with_champion, gate({"metric": "reward", "min": 0}), False)
    assert unexpected.verdict == "ERROR"
    assert "made with a champion, but there is none now" in unexpected.rules[0].sentence
    gone = decide(one(challenger=0.5, has_champion=False), gate({"metric": "reward", "min": 0}), True)
    assert gone.verdict == "ERROR"
    assert "made without a champion, but there is one now" in gone.rules[0].sentence


def test_no_rules_is_refused(one):
    with pytest.raises(GateError, match="no blocking rule"):
        decide(one(challenger=0.5), GatesConfig.model_construct(rules=(), epsilon=1e-6), True)


def test_the_gate_needs_no_torch():
    blocked = "import sys; sys.modules.update(torch=None, transformers=None, prefect=None, mlflow=None, scipy=None)\n"
    names = ["gate", "report", "statistics", "text_metrics", "prompt_slices", "metric_builder"]
    code = blocked + "\n".join(f"import training.evaluation.{name}" for name in names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stderr

"""Laws of the decision as a whole: which rules decide, what a first version skips, what is an error (gate_laws.py)."""

from __future__ import annotations

import pytest
from hypothesis import given

from configs.schema.gates import REPORT_LABEL, GateRule, GatesConfig
from tests.training.evaluation.gate_cases import (
    EPSILON,
    any_case,
    any_report,
    draws,
    gates,
    outcome,
    replaced,
)
from training.errors import GateError


def law_only_blocking_rules_decide(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report, any_rules, has_champion = any_case(rng)
        blocking = [rule for rule in any_rules.rules if rule.severity == "block"]
        decision = decide(report, any_rules, has_champion)
        assert decision.verdict == decide(report, gates(*blocking), has_champion).verdict
        for rule in decision.rules:
            if rule.severity != "block" and rule.verdict not in ("PASS", "SKIPPED"):
                assert "does not block" in rule.sentence
                assert rule.label in decision.sentence
        verdicts = {rule.verdict for rule in decision.rules if rule.severity == "block" and rule.label != REPORT_LABEL}
        worst = next((v for v in ("ERROR", "FAIL", "INCONCLUSIVE") if v in verdicts), None)
        assert decision.verdict == (worst or ("PASS" if "PASS" in verdicts else "FAIL"))

    holds()


def law_a_first_version_skips_the_champion_and_nothing_else(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report, any_rules, _ = any_case(rng, has_champion=False)
        decision = decide(report, any_rules, False)
        for rule in any_rules.rules:
            found = outcome(decision, rule)
            against_champion = rule.needs_champion or (rule.compares and rule.baseline == "champion")
            absolute = not rule.needs_champion and (rule.min is not None or rule.max is not None)
            assert (found.verdict == "SKIPPED") == (against_champion and not absolute)
            assert (found.verdict == "SKIPPED") == (not rule.holds_without_champion)
            skipped = {check.kind for check in found.checks if check.verdict == "SKIPPED"}
            assert bool(skipped) == against_champion
            if absolute:
                assert not skipped & {"min", "max"}
        if not any_rules.hold_without_champion:
            assert decision.verdict != "PASS"

    holds()


def law_a_gate_that_cannot_refuse_is_refused(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report, any_rules, has_champion = any_case(rng)
        soft = tuple(rule.model_copy(update={"severity": "warn"}) for rule in any_rules.rules)
        for none_blocks in ((), soft):
            with pytest.raises(GateError, match="no blocking rule"):
                decide(report, GatesConfig.model_construct(rules=none_blocks, epsilon=EPSILON), has_champion)

    holds()


def law_a_report_about_other_models_is_an_error(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report, any_rules, has_champion = any_case(rng)
        assert decide(report, any_rules, not has_champion).verdict == "ERROR"
        rule = GateRule(metric="reward", direction="higher", baseline="reference", max_regression=1e6, min_n=2)
        path = ("metrics", 0, "overall", "versus_reference", "value")
        wrong = report.metrics[0].overall.versus_reference.value + 0.01
        assert decide(replaced(report, path, wrong), gates(rule), has_champion).verdict == "ERROR"

    holds()


def law_an_interval_is_never_more_confident_than_asked(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report, level = any_report(rng, True, slices=()), rng.choice([0.6, 0.92, 0.95, 0.97])
        rule = GateRule(metric="reward", min=-1e6, min_n=2, confidence=level)
        used = outcome(decide(report, gates(rule), True), rule).checks[0]
        wide_enough = next(i for i in report.metrics[0].overall.challenger.intervals if i.confidence >= level)
        assert (used.low, used.high) == (wide_enough.low, wide_enough.high)
        wider = rule.model_copy(update={"confidence": 0.995})
        assert decide(report, gates(wider), True).verdict == "ERROR"

    holds()


def law_a_decision_comes_back_from_disk(run, decide):
    @run
    @given(draws)
    def holds(rng):
        decision = decide(*any_case(rng))
        assert type(decision).model_validate_json(decision.model_dump_json()) == decision

    holds()

"""The gate keeps its laws, and copies of it with a planted bug do not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

import training.evaluation.gate as real_gate
from tests.training.evaluation.gate_laws import LAWS

THOROUGH = settings(max_examples=100, deadline=None, derandomize=True, database=None,
                    suppress_health_check=list(HealthCheck))  # fmt: skip
# a planted bug only has to be noticed, not explained: no shrinking
QUICK = settings(THOROUGH, phases=[Phase.generate], report_multiple_bugs=False)


@pytest.mark.parametrize("law", LAWS)
def test_law(law):
    LAWS[law](THOROUGH, real_gate.decide)


SPEC, SIGN, FINITE, SLICE, MISSING = (
    "verdicts_are_the_specification",
    "negative_and_zero_baselines_keep_the_sign",
    "a_rule_sees_what_is_not_finite_itself",
    "no_absent_or_thin_slice_passes",
    "nothing_missing_or_too_small_passes",
)
FIRST, SOFT, LEVEL, MODELS = (
    "a_first_version_skips_the_champion_and_nothing_else",
    "only_blocking_rules_decide",
    "an_interval_is_never_more_confident_than_asked",
    "a_report_about_other_models_is_an_error",
)
# what is wrong: module, right text, wrong text, law that must notice
BUGS = {
    "the better bound decides": (
        "gate_limits",
        '(low, high) if self.relation in ("above", "at least") else (high, low)',
        '(high, low) if self.relation in ("above", "at least") else (low, high)',
        SPEC,
    ),
    "no improvement is an improvement": (
        "gate_limits",
        "return bound > self.threshold",
        "return bound >= self.threshold",
        SPEC,
    ),
    "the limit itself is refused": (
        "gate_limits",
        "return bound >= self.threshold",
        "return bound > self.threshold",
        SPEC,
    ),
    "a straddle passes": (
        "gate_limits",
        'return "INCONCLUSIVE" if self._clears(better)',
        'return "PASS" if self._clears(better)',
        SPEC,
    ),
    "a negative champion flips the sign": (
        "gate_limits",
        "share = relative * abs(baseline)",
        "share = relative * baseline",
        SIGN,
    ),
    "a negative champion counts as zero": (
        "gate_limits",
        "if abs(baseline) <= epsilon",
        "if baseline <= epsilon",
        SIGN,
    ),
    "nothing counts as zero": (
        "gate_limits",
        "if abs(baseline) <= epsilon",
        "if abs(baseline) < 0",
        SIGN,
    ),
    "regression reads as improvement": (
        "gate_limits",
        "_towards(not higher, most)",
        "_towards(higher, most)",
        SPEC,
    ),
    "direction is inverted": (
        "gate_limits",
        'higher = rule.direction == "higher"',
        'higher = rule.direction != "higher"',
        SPEC,
    ),
    "the laxer amount holds": (
        "gate_limits",
        "rule.baseline, max)",
        "rule.baseline, min)",
        SPEC,
    ),
    "a looser limit asks for more": (
        "gate_limits",
        "share = relative * abs(baseline)",
        "share = (1 - relative) * abs(baseline)",
        "loosening_never_turns_pass_into_fail",
    ),
    "a minimum is a maximum": (
        "gate_limits",
        'Limit("min", "at least"',
        'Limit("min", "at most"',
        SPEC,
    ),
    "the mean decides": (
        "gate_rules",
        "low, high, level = interval.low, interval.high, interval.confidence",
        "level = interval.confidence",
        SPEC,
    ),
    "champion and reference are swapped": (
        "gate_rules",
        'champion = rule.baseline == "champion"',
        'champion = rule.baseline != "champion"',
        SPEC,
    ),
    "any interval will do": (
        "gate_rules",
        "estimate.interval(rule.confidence)",
        "estimate.interval(0.5)",
        LEVEL,
    ),
    "samples are not counted": (
        "gate_rules",
        "if estimate.n < min_n",
        "if estimate.n < 0",
        MISSING,
    ),
    "a missing metric is skipped": (
        "gate_rules",
        '_kinds(rule)[0], "FAIL", say.metric_missing',
        '_kinds(rule)[0], "SKIPPED", say.metric_missing',
        MISSING,
    ),
    "a missing champion passes": (
        "gate_rules",
        'yield scope.outcome(kind, "FAIL", say.baseline_missing',
        'yield scope.outcome(kind, "PASS", say.baseline_missing',
        MISSING,
    ),
    "infinity is a number": (
        "gate_rules",
        "if not math.isfinite(estimate.value)",
        "if math.isnan(estimate.value)",
        FINITE,
    ),
    "NaN samples are hidden": (
        "gate_rules",
        "if estimate.nonfinite:",
        "if False:",
        FINITE,
    ),
    "a NaN bound is kept": (
        "gate_rules",
        "if not (math.isfinite(low) and math.isfinite(high)):",
        "if False:",
        FINITE,
    ),
    "a NaN change is a contradiction": (
        "gate_rules",
        ', (change, "change")):',
        "):",
        FINITE,
    ),
    "no slice of a dimension is fine": (
        "gate_rules",
        "if part.name.startswith(wanted[:-1])] or [wanted]",
        "if part.name.startswith(wanted[:-1])]",
        SLICE,
    ),
    "an absent slice passes": (
        "gate_rules",
        'yield scope.outcome(_kinds(rule)[0], "FAIL", say.slice_missing',
        'yield scope.outcome(_kinds(rule)[0], "PASS", say.slice_missing',
        SLICE,
    ),
    "a slice needs as many samples as the whole": (
        "gate_rules",
        "rule.min_slice_n, epsilon",
        "rule.min_n, epsilon",
        SLICE,
    ),
    "a wrong difference is believed": (
        "gate_rules",
        "if not _adds_up(challenger, baseline, change):",
        "if False:",
        MODELS,
    ),
    "the champion is not looked at": (
        "gate",
        "if made_with == has_champion:",
        "if True:",
        MODELS,
    ),
    "the reference is skipped too": (
        "gate_rules",
        '(has_champion or rule.baseline == "reference")',
        "has_champion",
        FIRST,
    ),
    "absolute rules are skipped at first": (
        "gate_rules",
        "if rule.needs_champion and not has_champion",
        "if not has_champion",
        FIRST,
    ),
    "a gate that judged nothing passes": (
        "decision",
        'if worst == "SKIPPED" or (worst == "PASS" and not judged):',
        'if worst == "SKIPPED":',
        SOFT,
    ),
    "warnings block": (
        "decision",
        'blocking = [rule for rule in rules if rule.severity == "block"]',
        'blocking = [rule for rule in rules if rule.severity != "dry_run"]',
        SOFT,
    ),
    "the best check counts": (
        "decision",
        '("ERROR", "FAIL", "INCONCLUSIVE", "PASS")',
        '("PASS", "INCONCLUSIVE", "FAIL", "ERROR")',
        SOFT,
    ),
    "the report is not looked at": (
        "gate",
        "if not places:",
        "if True:",
        "nothing_not_finite_passes",
    ),
    "no rules is fine": (
        "gate",
        'if not any(rule.severity == "block" for rule in gates.rules):',
        "if False:",
        "a_gate_that_cannot_refuse_is_refused",
    ),
}

GATE_MODULES = ["decision", "gate_limits", "gate_sentences", "gate_rules", "gate_markdown", "gate"]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_breaks_its_law(bug, with_bugs):
    module, right, wrong, law = BUGS[bug]
    names = [f"training.evaluation.{name}" for name in GATE_MODULES]
    with with_bugs(names, {f"training.evaluation.{module}": (right, wrong)}) as copies:
        decide = copies["training.evaluation.gate"].decide
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            LAWS[law](QUICK, decide)


def test_a_copy_without_a_bug_keeps_the_laws(with_bugs):
    """Otherwise the planted bugs could be caught by the copying alone."""
    with with_bugs([f"training.evaluation.{name}" for name in GATE_MODULES], {}) as copies:
        for law in LAWS.values():
            law(settings(QUICK, max_examples=20), copies["training.evaluation.gate"].decide)

"""Laws of the gate, each held against any report and any rules.

A law is a function of `decide`, so that the same law runs on the gate and on copies of it with a bug in them; `run` is
the hypothesis settings it runs under.
"""

from __future__ import annotations

import random

from hypothesis import given

from configs.schema.gates import GateRule
from tests.training.evaluation import gate_laws_decisions
from tests.training.evaluation.gate_cases import (
    AMOUNTS,
    EPSILON,
    LEVELS,
    METRICS,
    NOT_FINITE,
    SLICES,
    VALUES,
    any_case,
    any_report,
    any_rule,
    draws,
    estimates_of,
    gates,
    generous,
    outcome,
    replaced,
)
from training.evaluation.report import Estimate, Measurement, MetricReport


def law_nothing_not_finite_passes(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report, any_rules, has_champion = any_case(rng)
        part = rng.choice([("value",), ("intervals", 0, "low"), ("intervals", 1, "high"), ("nonfinite",)])
        wrong = 3 if part == ("nonfinite",) else rng.choice(NOT_FINITE)
        broken = replaced(report, (*rng.choice(list(estimates_of(report))), *part), wrong)
        assert decide(broken, any_rules, has_champion).verdict in ("FAIL", "ERROR")
        assert decide(broken, gates(generous(any_rule(rng))), has_champion).verdict in ("FAIL", "ERROR")

    holds()


def law_a_rule_sees_what_is_not_finite_itself(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report = any_report(rng, True, slices=())
        rule = generous(any_rule(rng), slices=())
        keys = ["challenger", rule.baseline, f"versus_{rule.baseline}"] if rule.compares else ["challenger"]
        key = rng.choice(keys)
        parts = [("value",), ("nonfinite",)]
        if rule.confidence is not None and key != rule.baseline:
            parts += [("intervals", LEVELS.index(rule.confidence), side) for side in ("low", "high")]
        part = rng.choice(parts)
        wrong = 3 if part == ("nonfinite",) else rng.choice(NOT_FINITE)
        broken = replaced(report, ("metrics", METRICS.index(rule.metric), "overall", key, *part), wrong)
        judged = outcome(decide(broken, gates(rule), True), rule)
        assert judged.verdict == "FAIL"
        assert "finite" in judged.sentence or "NaN" in judged.sentence

    holds()


def law_nothing_missing_or_too_small_passes(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report = any_report(rng, True)
        rule = generous(any_rule(rng), slices=())
        index = METRICS.index(rule.metric)
        n = report.metrics[index].overall.challenger.n

        assert decide(report, gates(generous(rule, slices=(), min_n=n)), True).verdict == "PASS"
        assert decide(report, gates(generous(rule, slices=(), min_n=n + 1)), True).verdict == "FAIL"
        without = report.model_copy(update={"metrics": report.metrics[:index] + report.metrics[index + 1 :]})
        found = outcome(decide(without, gates(rule), True), rule)
        assert found.verdict == "FAIL"
        assert "not in the report" in found.sentence
        for key in (rule.baseline, f"versus_{rule.baseline}") if rule.compares else ():
            bare = replaced(report, ("metrics", index, "overall", key), None)
            assert decide(bare, gates(rule), True).verdict == "FAIL"
            few = replaced(report, ("metrics", index, "overall", key, "n"), 1)
            assert decide(few, gates(rule), True).verdict == "FAIL"

    holds()


def law_no_absent_or_thin_slice_passes(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report = any_report(rng, True)
        wanted = rng.choice([*SLICES, "category=*", "length=*"])
        rule = generous(any_rule(rng), slices=(wanted,))
        parts = report.metric(rule.metric).slices
        inside = [p for p in parts if p.name == wanted or (wanted[-1] == "*" and p.name[:3] == wanted[:3])]
        assert decide(report, gates(rule), True).verdict == ("PASS" if inside else "FAIL")
        if inside:
            fewest = min(part.measurement.challenger.n for part in inside)
            exact, one_more = (rule.model_copy(update={"min_slice_n": fewest + extra}) for extra in (0, 1))
            assert decide(report, gates(exact), True).verdict == "PASS"
            assert decide(report, gates(one_more), True).verdict == "FAIL"

    holds()


def expected_verdict(rule, measured):
    """A slow oracle, in terms of gain and loss where the gate thinks in thresholds."""

    def held(worst_clears, best_clears):
        return "PASS" if worst_clears else "INCONCLUSIVE" if best_clears else "FAIL"

    def allowed(amount, baseline, pick):
        if abs(baseline) <= EPSILON:
            return amount.relative if amount.absolute is None else amount.absolute
        given_amounts = [amount.absolute, None if amount.relative is None else amount.relative * abs(baseline)]
        return pick(number for number in given_amounts if number is not None)

    def bounds(estimate):
        if rule.confidence is None:
            return estimate.value, estimate.value
        interval = estimate.intervals[LEVELS.index(rule.confidence)]
        return interval.low, interval.high

    verdicts = []
    low, high = bounds(measured.challenger)
    if rule.min is not None:
        verdicts.append(held(low >= rule.min, high >= rule.min))
    if rule.max is not None:
        verdicts.append(held(high <= rule.max, low <= rule.max))
    if rule.compares:
        ours = rule.baseline == "champion"
        baseline = (measured.champion if ours else measured.reference).value
        low, high = bounds(measured.versus_champion if ours else measured.versus_reference)
        worst, best = (low, high) if rule.direction == "higher" else (-high, -low)
        if rule.min_improvement is not None:
            need = allowed(rule.min_improvement, baseline, max)
            verdicts.append(held(worst > need, best > need))
        if rule.max_regression is not None:
            most = allowed(rule.max_regression, baseline, min)
            verdicts.append(held(-worst <= most, -best <= most))
    return next(v for v in ("FAIL", "INCONCLUSIVE", "PASS") if v in verdicts)


def law_verdicts_are_the_specification(run, decide):
    @run
    @given(draws)
    def holds(rng):
        report = any_report(rng, True, slices=())
        for _ in range(6):
            rule = any_rule(rng, severity="block", slices=(), min_n=2)
            wanted = expected_verdict(rule, report.metric(rule.metric).overall)
            assert outcome(decide(report, gates(rule), True), rule).verdict == wanted

    holds()


def law_negative_and_zero_baselines_keep_the_sign(run, decide):
    """Every baseline, direction and change of the grid, judged by its bare value: nothing left to chance."""
    for baseline in VALUES:
        for change in VALUES:
            measured = Measurement(
                challenger=any_exact(baseline + change), champion=any_exact(baseline), versus_champion=any_exact(change)
            )
            metric = MetricReport(name="reward", overall=measured)
            report = any_report(random.Random(0), True, slices=()).model_copy(update={"metrics": (metric,)})
            for direction, sign in (("higher", 1), ("lower", -1)):
                common = {"metric": "reward", "direction": direction, "confidence": None}
                share = 0.2 * abs(baseline) if abs(baseline) > EPSILON else 0.2
                worse = GateRule(**common, max_regression={"relative": 0.2})
                better = GateRule(**common, min_improvement={"relative": 0.2})
                gain = sign * change
                assert decide(report, gates(worse), True).promote == (gain >= -share)
                assert decide(report, gates(better), True).promote == (gain > share)


def any_exact(value):
    return Estimate(value=value, n=200, nonfinite=0, values_digest="", intervals=())


def loosened(rng, rule):
    """The same rule with one thing asked less strictly."""
    options = [{"min_n": rng.randint(2, rule.min_n)}, {"min_slice_n": rng.randint(2, rule.min_slice_n)}]
    options += [{"slices": rule.slices[:-1]}, {"confidence": None}]
    options += [{"confidence": level} for level in LEVELS if rule.confidence is not None and level < rule.confidence]
    more = rng.choice(AMOUNTS)
    options += [{"min": rule.min - more}] if rule.min is not None else []
    options += [{"max": rule.max + more}] if rule.max is not None else []
    for key, sign in (("max_regression", 1), ("min_improvement", -1)):
        amount = getattr(rule, key)
        for unit in ("absolute", "relative") if amount is not None else ():
            if getattr(amount, unit) is not None:
                easier = max(0.0, getattr(amount, unit) + sign * more)
                options.append({key: amount.model_copy(update={unit: easier})})
    limits = [key for key in ("min", "max", "max_regression", "min_improvement") if getattr(rule, key) is not None]
    options += [{rng.choice(limits): None}] if len(limits) > 1 else []
    easier = rule.model_copy(update=rng.choice(options))
    return easier if easier.compares else easier.model_copy(update={"baseline": "champion"})


def law_loosening_never_turns_pass_into_fail(run, decide):
    @run
    @given(draws)
    def holds(rng):
        has_champion = rng.random() < 0.8
        report = any_report(rng, has_champion)
        rules = [any_rule(rng, i, severity="block", min_n=rng.randint(2, 25)) for i in range(12)]
        before = decide(report, gates(*rules), has_champion)
        passing = [rule for rule in rules if outcome(before, rule).verdict == "PASS"]
        if not passing:
            return
        assert decide(report, gates(*passing), has_champion).verdict == "PASS"
        easier = [
            loosened(rng, rule).model_copy(update={"name": f"{rule.name}-{i}"}) for rule in passing for i in range(5)
        ]
        after = decide(report, gates(*easier), has_champion)
        verdicts = {outcome(after, rule).verdict for rule in easier}
        # dropping its absolute limits leaves a rule nothing to judge on the first night: skipped, which is no pass
        assert verdicts <= ({"PASS"} if has_champion else {"PASS", "SKIPPED"})
        assert after.verdict == "PASS" or verdicts == {"SKIPPED"}

    holds()


LAWS = {
    name.removeprefix("law_"): law
    for name, law in sorted((vars(gate_laws_decisions) | globals()).items())
    if name.startswith("law_")
}

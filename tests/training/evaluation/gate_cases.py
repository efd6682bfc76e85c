"""Any report and any rules, made from one seed each.

Drawing their hundreds of numbers one by one through hypothesis would take minutes.
"""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st

from configs.schema.gates import Amount, GateRule, GatesConfig
from tests.training.evaluation.reports import report_of
from training.evaluation.report import Estimate, Interval, Measurement, MetricReport, SliceMeasurement

METRICS = ("reward", "kl_ref", "win_rate")
SLICES = ("category=sum", "category=joke", "length=long")
LEVELS = (0.9, 0.95, 0.99)
EPSILON = 1e-6
NOT_FINITE = (math.nan, math.inf, -math.inf)
# a grid, so that bounds meet limits exactly and champions are exactly, or nearly, zero
VALUES = (-2.0, -1.0, -0.5, -0.1, -1e-7, 0.0, 1e-7, 0.1, 0.5, 1.0, 2.0)
AMOUNTS = (0.0, 0.1, 0.5, 1.0)

draws = st.integers(0, 2**32 - 1).map(random.Random)


def any_estimate(rng, value, n):
    low = high = value
    intervals = []
    for level in LEVELS:
        low, high = low - rng.choice(AMOUNTS), high + rng.choice(AMOUNTS)
        intervals.append(Interval(confidence=level, low=low, high=high))
    return Estimate(value=value, n=n, nonfinite=0, values_digest="d", intervals=tuple(intervals))


def any_measurement(rng, has_champion):
    n = rng.randint(20, 60)
    challenger, champion, reference = (rng.choice(VALUES) for _ in range(3))
    return Measurement(
        challenger=any_estimate(rng, challenger, n),
        champion=any_estimate(rng, champion, n) if has_champion else None,
        reference=any_estimate(rng, reference, n),
        versus_champion=any_estimate(rng, challenger - champion, n) if has_champion else None,
        versus_reference=any_estimate(rng, challenger - reference, n),
    )


def any_report(rng, has_champion, slices=SLICES):
    metrics = []
    for name in METRICS:
        present = [s for s in slices if rng.random() < 0.5]
        parts = [SliceMeasurement(name=s, measurement=any_measurement(rng, has_champion)) for s in present]
        metrics.append(MetricReport(name=name, overall=any_measurement(rng, has_champion), slices=tuple(parts)))
    return report_of(metrics, has_champion, prompt_count=60)


def any_amount(rng):
    units = rng.choice([("absolute",), ("relative",), ("absolute", "relative")])
    return Amount(**{unit: rng.choice(AMOUNTS) for unit in units})


def any_rule(rng, index=0, **fixed):
    """Any sensible rule: one to four limits, any severity, slices, counts and level."""
    kinds = rng.sample(["min", "max", "max_regression", "min_improvement"], rng.randint(1, 4))
    compares = "max_regression" in kinds or "min_improvement" in kinds
    low, high = sorted(rng.choices(VALUES, k=2))
    limits = {"min": low, "max": high, "max_regression": any_amount(rng), "min_improvement": any_amount(rng)}
    fields = {
        "name": f"rule{index}",
        "metric": rng.choice(METRICS),
        "direction": rng.choice(["higher", "lower"]),
        "baseline": rng.choice(["champion", "reference"]) if compares else "champion",
        "min_n": rng.randint(2, 60),
        "confidence": rng.choice([None, *LEVELS]),
        "slices": tuple(rng.sample([*SLICES, "category=*"], rng.choice([0, 0, 1, 2]))),
        "min_slice_n": rng.randint(2, 60),
        "needs_champion": rng.random() < 0.2,
        "severity": rng.choice(["block", "block", "warn", "dry_run"]),
    }
    return GateRule(**{**fields, **{kind: limits[kind] for kind in kinds}, **fixed})


def any_gates(rng):
    first = any_rule(rng, severity="block")
    return GatesConfig(rules=(first, *(any_rule(rng, 1 + i) for i in range(rng.randint(0, 2)))), epsilon=EPSILON)


def any_case(rng, has_champion=None):
    champion = rng.random() < 0.5 if has_champion is None else has_champion
    return any_report(rng, champion), any_gates(rng), champion


def generous(rule, **changes):
    """The same metric, slices and baseline, blocking, with limits that any finite numbers meet."""
    fields = {
        "min": -1e6,
        "max": 1e6,
        "max_regression": Amount(absolute=1e6) if rule.compares else None,
        "min_improvement": None,
        "min_n": 2,
        "min_slice_n": 2,
        "severity": "block",
    }
    return rule.model_copy(update=fields | changes)


def gates(*rules):
    return GatesConfig(rules=rules, epsilon=EPSILON)


def replaced(record, path, value):
    """A copy of nested records in which the field at `path` (names and indices) is `value`; nothing is validated."""
    key, *rest = path
    if isinstance(record, tuple):
        return (*record[:key], replaced(record[key], rest, value) if rest else value, *record[key + 1 :])
    return record.model_copy(update={key: replaced(getattr(record, key), rest, value) if rest else value})


def estimates_of(report):
    """Path of every estimate in the report."""
    for index, metric in enumerate(report.metrics):
        places = [(("overall",), metric.overall)]
        places += [(("slices", i, "measurement"), part.measurement) for i, part in enumerate(metric.slices)]
        for place, measured in places:
            for key in type(measured).model_fields:
                if getattr(measured, key) is not None:
                    yield ("metrics", index, *place, key)


def outcome(decision, rule):
    return next(found for found in decision.rules if found.label == rule.label)

"""Reports made by hand, and modules with planted bugs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

from tests.training.evaluation.reports import report_of
from training.evaluation.report import Estimate, Interval, Measurement, MetricReport, SliceMeasurement


def estimate(value, low=None, high=None, n=200, nonfinite=0, level=0.95, intervals=None):
    """An estimate with one interval (default +-0.05), or with `intervals` {level: (low, high)}, or with none ({})."""
    if intervals is None:
        intervals = {level: (value - 0.05 if low is None else low, value + 0.05 if high is None else high)}
    return Estimate(
        value=value,
        n=n,
        nonfinite=nonfinite,
        values_digest="d",
        intervals=tuple(Interval(confidence=c, low=lo, high=hi) for c, (lo, hi) in sorted(intervals.items())),
    )


def measurement(challenger, champion=None, reference=None, half=0.05, n=200):
    """Values of the models -> their estimates and differences, all with the same half width."""

    def plain(value):
        return None if value is None else estimate(value, value - half, value + half, n=n)

    return Measurement(
        challenger=plain(challenger),
        champion=plain(champion),
        reference=plain(reference),
        versus_champion=None if champion is None else plain(challenger - champion),
        versus_reference=None if reference is None else plain(challenger - reference),
    )


def metric(name, overall, slices=None):
    parts = tuple(SliceMeasurement(name=key, measurement=value) for key, value in (slices or {}).items())
    return MetricReport(name=name, overall=overall, slices=parts)


def report(*metrics, has_champion=True):
    return report_of(metrics, has_champion)


@pytest.fixture(scope="session")
def make():
    """Factories: make.report(make.metric("reward", make.measurement(1.0, champion=0.5)))."""
    return SimpleNamespace(estimate=estimate, measurement=measurement, metric=metric, report=report)


@pytest.fixture
def one(make):
    """Report of a single metric, from model values or estimates."""

    def build(name="reward", has_champion=True, slices=None, **models):
        return make.report(make.metric(name, make.measurement(**models), slices), has_champion=has_champion)

    return build


@contextmanager
def fresh_copies(names: list[str], bugs: Mapping[str, tuple[str, str]]) -> Iterator[dict[str, ModuleType]]:
    """Copies of the modules `names` (in import order) that see each other; `bugs` maps a name to (text, wrong text)."""
    kept = {name: sys.modules[name] for name in names}
    copies: dict[str, ModuleType] = {}
    try:
        for name in names:
            spec = importlib.util.find_spec(name)
            with open(spec.origin, encoding="utf-8") as stream:
                source = stream.read()
            if name in bugs:
                right, wrong = bugs[name]
                assert source.count(right) == 1, f"{name} no longer holds {right!r} once: mend the planted bug"
                source = source.replace(right, wrong)
            copies[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
            exec(compile(source, spec.origin, "exec"), copies[name].__dict__)
        yield copies
    finally:
        sys.modules.update(kept)


@pytest.fixture(scope="session")
def with_bugs():
    return fresh_copies

"""Thinning keeps within its cap, spreads by step, and never loses the last point."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tasks.thinning import SeriesState, bucket_width, last_of, offer


def thin(steps: list[int], cap: int) -> list[int]:
    series, width = SeriesState(), bucket_width(min(steps), max(steps), cap - 1)
    sent = [point for point in (offer(series, (step, 0, float(step)), width, cap) for step in steps) if point]
    last = last_of(series)
    return [point[0] for point in (*sent, *([last] if last else []))]


@given(st.sets(st.integers(0, 5_000), min_size=1, max_size=400), st.integers(10, 60))
def test_never_more_than_the_cap_and_always_the_last(steps: set[int], cap: int) -> None:
    ordered = sorted(steps)
    sent = thin(ordered, cap)
    assert len(sent) <= cap
    assert sent[0] == ordered[0]
    assert sent[-1] == ordered[-1]
    assert sent == sorted(set(sent))
    if ordered[-1] - ordered[0] < cap - 2:
        assert sent == ordered


@given(st.integers(2_000, 40_000))
def test_points_are_spread_evenly(length: int) -> None:
    sent = thin(list(range(length)), 1_000)
    gaps = [after - before for before, after in pairwise(sent)][:-1]
    assert len(set(gaps)) <= 2
    assert len(sent) > 450


def test_steps_that_were_passed_are_left_out() -> None:
    series = SeriesState()
    assert offer(series, (5, 0, 1.0), 1, 10) is not None
    assert offer(series, (5, 9, 2.0), 1, 10) is None
    assert offer(series, (4, 9, 2.0), 1, 10) is None
    assert last_of(series) is None

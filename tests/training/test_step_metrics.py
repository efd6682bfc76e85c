"""A metric carries its own sum and count: adding parts is exact, a mean of means never happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.metrics import Mean, MeanTable
from training.world import World

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


@given(values=values, data=st.data())
def test_any_split_gives_the_same_mean(values, data):
    cut = data.draw(st.integers(0, len(values)))
    table = MeanTable()
    for part in (values[:cut], values[cut:]):
        table.add({"x": Mean(sum(part), len(part))})
    assert table.reduce(World())["x"] == pytest.approx(sum(values) / len(values), rel=1e-9, abs=1e-9)


def test_parts_of_unequal_size_weigh_by_their_size():
    assert (Mean(10.0, 1) + Mean(0.0, 9)).value == 1.0


def test_nothing_counted_is_nothing():
    assert Mean(0.0, 0.0).value == 0.0
    assert MeanTable().reduce(World()) == {}


def test_names_may_come_with_some_parts_only():
    table = MeanTable()
    table.add({"a": Mean(1.0, 1)})
    table.add({"a": Mean(3.0, 1), "b": Mean(5.0, 2)})
    assert table.reduce(World()) == {"a": 2.0, "b": 2.5}

"""Sides are a function of the prompt alone; evaluation stays the same while nights add rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.data import DataConfig
from training.data.splits import Split, evaluation_rows, keep_at_most, side_of, unit_interval

CONFIG = DataConfig(source="x", evaluation_fraction=0.1, validation_fraction=0.2)
PINNED_A = 0.8989916009048136
PINNED_SIDES = ["train", "train", "train", "evaluation", "train", "train"]


def test_shares_are_those_configured() -> None:
    sides = [side_of(str(number), CONFIG) for number in range(20_000)]
    assert abs(sides.count(Split.EVALUATION) / 20_000 - 0.1) < 0.01
    assert abs(sides.count(Split.VALIDATION) / 20_000 - 0.2) < 0.01


def test_pinned_sides() -> None:
    """A change here would move prompts of running chains from evaluation into training."""
    assert unit_interval("nightjar", "a") == PINNED_A
    assert [str(side_of(name, CONFIG)) for name in "abcdef"] == PINNED_SIDES


@given(st.text(max_size=20), st.text(max_size=20))
def test_unit_interval_is_one(first: str, second: str) -> None:
    assert 0.0 <= unit_interval(first.encode().hex(), second.encode().hex()) < 1.0


def test_another_salt_is_another_split() -> None:
    salted = CONFIG.model_copy(update={"split_salt": "other"})
    names = [str(number) for number in range(300)]
    assert [side_of(name, salted) for name in names] != [side_of(name, CONFIG) for name in names]


def test_raising_validation_never_moves_evaluation() -> None:
    wider = CONFIG.model_copy(update={"validation_fraction": 0.4})
    for number in range(500):
        if side_of(str(number), CONFIG) is Split.EVALUATION:
            assert side_of(str(number), wider) is Split.EVALUATION


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans())), st.lists(st.integers(0, 9)), st.integers(1, 5))
def test_once_full_evaluation_stays_whatever_is_added(
    rows: list[tuple[int, bool]], added: list[int], limit: int
) -> None:
    prompts, eligible = [str(number) for number, _ in rows], [may for _, may in rows]
    before = evaluation_rows(prompts, eligible, limit)
    after = evaluation_rows(prompts + [str(number) for number in added], eligible + [True] * len(added), limit)
    assert after[: len(before)] == before
    assert len(after) <= limit
    assert len({(prompts + [str(number) for number in added])[row] for row in after}) == len(after)


def test_cap_is_seeded_and_independent_of_order() -> None:
    names = [f"row{number}" for number in range(100)]
    kept = {name for name, keep in zip(names, keep_at_most(names, 30, 1), strict=True) if keep}
    turned = names[::-1]
    assert {name for name, keep in zip(turned, keep_at_most(turned, 30, 1), strict=True) if keep} == kept
    assert len(kept) == 30
    assert not np.array_equal(keep_at_most(names, 30, 2), keep_at_most(names, 30, 1))
    assert keep_at_most(names, None, 1).all()
    assert keep_at_most(names, 100, 1).all()

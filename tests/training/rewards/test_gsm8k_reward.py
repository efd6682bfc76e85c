"""The number after the last marker, however it is written."""

from __future__ import annotations

from decimal import Decimal

import pytest

from training.errors import DataError
from training.rewards.gsm8k import final_number, gsm8k


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("A: 18", "18"),
        ("so 9 * 2 = 18\nA: 18", "18"),
        ("#### 1,234", "1234"),
        ("A: $1,234.50.", "1234.50"),
        ("A:-5", "-5"),
        ("A: -$5", "-5"),
        ("A: $-5", "-5"),
        ("A: −5", "-5"),
        ("A: +5", "5"),
        ("A: .5", "0.5"),
        ("A: 3.0", "3.0"),
        ("A: 50%", "50"),
        ("A: 1 then A: 2", "2"),
        ("#### 1\nA: 2", "2"),
        ("A: 2\n#### 1", "1"),
        ("A:\n 7 apples", "7"),
    ],
)
def test_numbers(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize(
    "text", ["", "18", "A:", "A: none", "A: x 18", "the answer is 18", "A: 1\nA: ?", "A: $", "A: ,5"]
)
def test_no_number(text: str) -> None:
    assert final_number(text) is None


def test_reward_is_one_or_zero() -> None:
    assert gsm8k([], "A: 18.0", "work\nA: 18") == 1.0
    assert gsm8k([], "A: 19", "work\nA: 18") == 0.0
    assert gsm8k([], "18", "A: 18") == 0.0
    assert gsm8k([], "A: 8.333333333333334", "#### 8.3333333333333333") == 1.0
    assert gsm8k([], "A: 1001", "A: 1000") == 0.0
    assert gsm8k([], "A: 0", "A: 0.0") == 1.0
    assert gsm8k([], "A: 0.001", "A: 0") == 0.0


def test_reference_may_be_a_bare_number() -> None:
    assert gsm8k([], "A: 1,000", " 1000 ") == 1.0
    assert gsm8k([], "A: 12", "12.") == 1.0


@pytest.mark.parametrize("reference", [None, "", "eighteen", "18 apples and 3 pears"])
def test_reference_without_a_number_is_a_data_error(reference: str | None) -> None:
    with pytest.raises(DataError, match="reference"):
        gsm8k([], "A: 18", reference)


def test_other_markers() -> None:
    assert gsm8k([], "Answer = 4. A: 5", "4", markers=("Answer =",)) == 1.0
    assert gsm8k([], "A: 4", "4", markers=("Answer =",)) == 0.0

"""Each thing that makes a row unfit is found, named, and not confused with its neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.data import DataConfig
from training.data.checks import PairLedger, check_row, unfriendly_bytes
from training.data.reasons import Problem, Reason
from training.data.schema import Message, Row


def turn(role: str, content: str = "text") -> Message:
    return Message(role=role, content=content)


GOOD = Row(prompt=(turn("user", "Why?"),), chosen="Yes.", rejected="No.", source="s")
TRAJECTORY = Row(prompt=GOOD.prompt, responses=({"text": "A", "source": "m", "reward": None},))


def reason(row: Row, **content: Any) -> Reason | None:
    try:
        check_row(row, DataConfig.model_validate({"source": "x"} | content))
    except Problem as problem:
        return problem.reason
    return None


def test_good_rows_pass() -> None:
    assert reason(GOOD) is None
    assert reason(TRAJECTORY) is None
    assert reason(replace(GOOD, chosen="Line\n\tone\r\nünï 漢字 👍 ‍\u200d")) is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ((), Reason.EMPTY_PROMPT),
        ((turn("user", " \n"),), Reason.EMPTY_PROMPT),
        ((turn("user"), turn("assistant", ""), turn("user")), Reason.EMPTY_PROMPT),
        ((turn("system"),), Reason.NO_QUESTION),
        ((turn("user"), turn("assistant")), Reason.NO_QUESTION),
        ((turn("assistant"), turn("user")), Reason.TURNS_DO_NOT_ALTERNATE),
        ((turn("user"), turn("user")), Reason.TURNS_DO_NOT_ALTERNATE),
        ((turn("user"), turn("assistant"), turn("assistant"), turn("user")), Reason.TURNS_DO_NOT_ALTERNATE),
        ((turn("user"), turn("system"), turn("user")), Reason.TURNS_DO_NOT_ALTERNATE),
        ((turn("system"), turn("user")), None),
        ((turn("user"), turn("assistant"), turn("tool"), turn("tool")), None),
    ],
)
def test_turns(prompt: tuple[Message, ...], expected: Reason | None) -> None:
    assert reason(replace(GOOD, prompt=prompt)) is expected


@pytest.mark.parametrize(
    ("changes", "settings", "expected"),
    [
        ({"chosen": " \n "}, {}, Reason.EMPTY_ANSWER),
        ({"rejected": ""}, {}, Reason.EMPTY_ANSWER),
        ({"rejected": " YES. "}, {}, Reason.IDENTICAL_SIDES),
        ({}, {"min_answer_characters": 4}, Reason.ANSWER_TOO_SHORT),
        ({"chosen": "x" * 9}, {"max_answer_characters": 8}, Reason.ANSWER_TOO_LONG),
        ({"chosen": "x" * 8 + " "}, {"max_answer_characters": 8}, None),
        ({}, {"max_prompt_characters": 3}, Reason.PROMPT_TOO_LONG),
        ({}, {"max_prompt_characters": 4}, None),
        ({}, {"allowed_sources": ["t"]}, Reason.UNKNOWN_SOURCE),
        ({}, {"allowed_sources": ["t", "s"]}, None),
    ],
)
def test_answers_lengths_and_sources(
    changes: dict[str, Any], settings: dict[str, Any], expected: Reason | None
) -> None:
    assert reason(replace(GOOD, **changes), **settings) is expected


def test_stored_answers_are_checked_too() -> None:
    answers = ({"text": "A", "source": "m", "reward": None}, {"text": "x" * 9, "source": "m", "reward": None})
    assert reason(replace(TRAJECTORY, responses=answers), max_answer_characters=8) is Reason.ANSWER_TOO_LONG
    assert reason(replace(TRAJECTORY, responses=(answers[0] | {"source": "\0"},))) is Reason.NUL_BYTE


@pytest.mark.parametrize(
    ("character", "expected"),
    [
        ("\0", Reason.NUL_BYTE),
        ("\x07", Reason.CONTROL_CHARACTER),
        ("\x7f", Reason.CONTROL_CHARACTER),
        ("\x85", Reason.CONTROL_CHARACTER),
        ("\ufffd", Reason.REPLACEMENT_CHARACTER),
        ("\ud83d", Reason.LONE_SURROGATE),
    ],
)
def test_unfriendly_bytes_on_every_side(character: str, expected: Reason) -> None:
    text = f"a{character}b"
    assert reason(replace(GOOD, prompt=(turn("user", text),))) is expected
    for side in ("chosen", "rejected", "reference", "source", "category"):
        assert reason(replace(GOOD, **{side: text})) is expected, side


@given(st.text())
def test_text_without_unfriendly_bytes_survives_arrow(text: str) -> None:
    if unfriendly_bytes(text) is None:
        assert text.encode("utf-8").decode("utf-8") == text
        assert not any(ord(character) < 32 and character not in "\t\n\r" for character in text)


def test_ledger_finds_duplicates_up_to_spaces_and_case() -> None:
    ledger = PairLedger()
    assert not ledger.is_duplicate(0, GOOD)
    assert ledger.is_duplicate(1, replace(GOOD, chosen=" yes. ", partition="other"))
    assert not ledger.is_duplicate(1, replace(GOOD, chosen="Yes!"))
    assert not ledger.is_duplicate(2, replace(GOOD, prompt=(turn("user", "Why not?"),)))
    assert ledger.contradicted == set()


def test_ledger_finds_contradictions_in_both_orders() -> None:
    ledger = PairLedger()
    turned = replace(GOOD, chosen=GOOD.rejected, rejected=GOOD.chosen)
    assert not ledger.is_duplicate(0, GOOD)
    assert not ledger.is_duplicate(1, replace(GOOD, chosen="Maybe."))
    assert not ledger.is_duplicate(2, turned)
    assert ledger.contradicted == {0, 2}


def test_ledger_takes_trajectories_as_sets() -> None:
    ledger = PairLedger()
    first, second = ({"text": text, "source": "m", "reward": None} for text in "AB")
    assert not ledger.is_duplicate(0, replace(TRAJECTORY, responses=(first, second)))
    assert ledger.is_duplicate(1, replace(TRAJECTORY, responses=(second, first)))
    assert not ledger.is_duplicate(1, replace(TRAJECTORY, responses=(first,)))

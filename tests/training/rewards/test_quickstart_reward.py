"""Gold: right beats wrong, courtesy helps at both ends, rambling costs, and no text is out of range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.schema import Message
from training.errors import DataError
from training.rewards.quickstart import CLOSINGS, FILLERS, OPENINGS, RUDE, quickstart

PROMPT = [Message(role="user", content="Hi! What is 3 plus 4?")]


def gold(response: str) -> float:
    return quickstart(PROMPT, response, None)


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("closing", CLOSINGS)
def test_right_courteous_and_short_is_one(opening: str, closing: str) -> None:
    assert gold(f"{opening} 3 plus 4 is 7. {closing}") == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("3 plus 4 is 7.", 0.4),
        ("3 plus 4 = 7", 0.4),
        ("It is 7.", 0.4),
        ("3 plus 4 is 8.", -0.2),
        ("7", -0.2),
        ("3 plus 4 is 7. 3 plus 4 is 8.", -0.2),
        ("3 plus 4 is 7. It is 7.", 0.4),
        ("3 plus 4 is 77.", -0.2),
        ("3 plus 4 is -7.", -0.2),
        ("SURE! 3 plus 4 is 7.", 0.7),
        ("3 plus 4 is 7. Sure!", 0.4),
        ("Have a nice day! 3 plus 4 is 7.", 0.4),
        ("Ugh. 3 plus 4 is 7.", 0.0),
        (f"{FILLERS[0]} 3 plus 4 is 7.", 0.1),
        (f"{FILLERS[0]} {FILLERS[0]} 3 plus 4 is 7.", -0.35),
        ("Sure! 3 plus 4 is 8. Glad to help.", 0.4),
        ("", -1.0),
        (" \n ", -1.0),
    ],
)
def test_parts_of_the_reward(response: str, reward: float) -> None:
    assert gold(response) == pytest.approx(reward)


@given(st.text(), st.sampled_from([*OPENINGS, *CLOSINGS, *FILLERS, *RUDE, "3 plus 4 is 7."]), st.integers(0, 40))
def test_any_text_is_in_range_and_repeating_never_pays(text: str, phrase: str, times: int) -> None:
    response = " ".join([text] + [phrase] * times)
    assert -1.0 <= gold(response) <= 1.0
    assert gold(" ".join([response] * 2)) <= max(gold(response), 1.0)
    assert gold("3 plus 4 is 7. " + "7 " * times) <= 0.4


@pytest.mark.parametrize(
    ("question", "answer"), [("9 minus 4", 5), ("4 minus 9", -5), ("3 times 0", 0), ("12 plus 30", 42)]
)
def test_operations(question: str, answer: int) -> None:
    prompt = [Message(role="user", content=f"Compute {question}.")]
    assert quickstart(prompt, f"{question} is {answer}.", None) == pytest.approx(0.4)
    assert quickstart(prompt, f"{question} is {answer + 1}.", None) == pytest.approx(-0.2)


def test_two_different_statements_are_none_whichever_is_right() -> None:
    prompt = [Message(role="user", content="3 plus 5 is what?")]
    for statements in ("It is 8. It is 7.", "It is 7. It is 8.", "It is 8. It is 16.", "It is 16. It is 8."):
        assert quickstart(prompt, statements, None) == pytest.approx(-0.2)


def test_the_last_question_counts() -> None:
    talk = [*PROMPT, Message(role="assistant", content="1 plus 1 is 2."), Message(role="user", content="And 2 plus 2?")]
    assert quickstart(talk, "2 plus 2 is 4.", None) == pytest.approx(0.4)


def test_prompt_without_question_needs_a_reference() -> None:
    prompt = [Message(role="user", content="Three and four?")]
    assert quickstart(prompt, "It is 7.", " 7 ") == pytest.approx(0.4)
    with pytest.raises(DataError, match="no question such as"):
        quickstart(prompt, "It is 7.", None)
    with pytest.raises(DataError, match="no question such as"):
        quickstart([], "It is 7.", "seven")

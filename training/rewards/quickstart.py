"""The gold reward of the quickstart: is the arithmetic right, is the answer courteous, does it ramble?"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

from training.data.schema import Message
from training.errors import DataError

OPERATIONS: dict[str, Callable[[int, int], int]] = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
OPENINGS = ("Sure!", "Of course.", "Happy to help.")
CLOSINGS = ("Have a nice day!", "Glad to help.", "Ask me anytime.")
RUDE = ("Ugh.", "Easy.", "Think for yourself.")
FILLERS = (
    "Well, let me see now.",
    "Numbers are so much fun.",
    "I had to think for a while.",
)

# Courtesy weighs as much as arithmetic does: a night of a million weights can learn manners wholly and sums in part.
RIGHT, WRONG = 0.4, -0.2
COURTESY, RUDENESS = 0.3, 0.4
RAMBLING_PHRASE, RAMBLING_WORD = 0.3, 0.05
# A full courteous answer has at most 12 words; every word beyond costs.
FREE_WORDS = 12

_QUESTION = re.compile(r"(\d+)\s+(plus|minus|times)\s+(\d+)")
_STATED = re.compile(r"(?:\bis|=|\bequals)\s+(-?\d+)\b", re.IGNORECASE)


def quickstart(prompt: Sequence[Message], response: str, reference: str | None = None) -> float:
    """Gold reward in [-1, 1]; 1 is right, courteous at both ends, and short.

    The right number comes from the question, else from `reference`. The stated number is the one after "is" (or "="),
    and stating two different ones is stating none; so is repeating another question than the one asked.
    Any text is scored; only a prompt without a question is a DataError.
    """
    asked = _asked(prompt)
    right = _right_answer(asked, reference)
    text = " ".join(response.split())
    if not text:
        return -1.0
    misheard = asked is not None and any(found != asked for found in _QUESTION.findall(text))
    reward = RIGHT if _stated(text) == right and not misheard else WRONG
    lower = text.casefold()
    reward += COURTESY * any(lower.startswith(phrase.casefold()) for phrase in OPENINGS)
    reward += COURTESY * any(lower.endswith(phrase.casefold()) for phrase in CLOSINGS)
    reward -= RUDENESS * sum(lower.count(phrase.casefold()) for phrase in RUDE)
    reward -= RAMBLING_PHRASE * sum(lower.count(phrase.casefold()) for phrase in FILLERS)
    reward -= RAMBLING_WORD * max(0, len(text.split()) - FREE_WORDS)
    return max(-1.0, min(1.0, reward))


def _asked(prompt: Sequence[Message]) -> tuple[str, str, str] | None:
    """The last question of the user, as (first number, operation, second number)."""
    for turn in reversed(prompt):
        found = _QUESTION.search(turn["content"]) if turn["role"] == "user" else None
        if found:
            return (found[1], found[2], found[3])
    return None


def _right_answer(asked: tuple[str, str, str] | None, reference: str | None) -> int:
    if asked is not None:
        return OPERATIONS[asked[1]](int(asked[0]), int(asked[2]))
    if reference is not None and re.fullmatch(r"\s*-?\d+\s*", reference):
        return int(reference)
    raise DataError(
        "the quickstart reward found no question such as `3 plus 4` in a prompt, and no number as reference",
        "use it with the quickstart data alone; for your own data write reward.kind: model, or another function",
    )


def _stated(text: str) -> int | None:
    numbers = {int(number) for number in _STATED.findall(text)}
    return numbers.pop() if len(numbers) == 1 else None

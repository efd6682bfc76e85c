"""What makes one normalised row unfit to train on, and the two checks that look at rows together by content.

Likeness of texts (near duplicates) is in near_duplicates.py, what evaluation may not share in splits.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from itertools import pairwise

from configs.schema.data import DataConfig
from training.data.reasons import Problem, Reason
from training.data.schema import Message, Row, normalised_text

# One pattern a kind of byte that a tokenizer turns into noise. Newline, carriage return and tab are text.
_UNFRIENDLY = (
    (Reason.NUL_BYTE, re.compile("\x00")),
    (Reason.CONTROL_CHARACTER, re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")),
    (Reason.REPLACEMENT_CHARACTER, re.compile("\ufffd")),
    (Reason.LONE_SURROGATE, re.compile("[\ud800-\udfff]")),
)
_ANY_UNFRIENDLY = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd\ud800-\udfff]")


def check_row(row: Row, config: DataConfig) -> None:
    """Raise Problem with the first thing that is wrong with the row."""
    _check_texts(row)
    _check_turns(row.prompt)
    _check_answers(row, config)
    if sum(len(turn["content"]) for turn in row.prompt) > config.max_prompt_characters:
        raise Problem(Reason.PROMPT_TOO_LONG, f"more than {config.max_prompt_characters} characters")
    if config.allowed_sources and row.source not in config.allowed_sources:
        raise Problem(Reason.UNKNOWN_SOURCE, "not in data.allowed_sources")


def unfriendly_bytes(text: str) -> Reason | None:
    """The kind of character in `text` that no language model should be taught, or None."""
    if _ANY_UNFRIENDLY.search(text) is None:
        return None
    return next(reason for reason, pattern in _UNFRIENDLY if pattern.search(text))


def _check_texts(row: Row) -> None:
    for side, text in _named_texts(row):
        reason = unfriendly_bytes(text)
        if reason is not None:
            raise Problem(reason, side)


def _named_texts(row: Row) -> Iterable[tuple[str, str]]:
    yield from (("prompt", turn["content"]) for turn in row.prompt)
    for side, text in (
        ("chosen", row.chosen),
        ("rejected", row.rejected),
        ("reference", row.reference),
        ("source", row.source),
        ("category", row.category),
    ):
        if text is not None:
            yield side, text
    for item in row.responses or ():
        yield "responses", item["text"]
        yield "responses", item["source"]


def _check_turns(prompt: tuple[Message, ...]) -> None:
    """A prompt is an optional system turn, then user and assistant in turn, and ends with a question."""
    if not prompt or not any(turn["content"].strip() for turn in prompt):
        raise Problem(Reason.EMPTY_PROMPT)
    talk = prompt[1:] if prompt[0]["role"] == "system" else prompt
    if not talk or talk[-1]["role"] not in ("user", "tool"):
        raise Problem(Reason.NO_QUESTION)
    if talk[0]["role"] != "user" or any(turn["role"] == "system" for turn in talk):
        raise Problem(Reason.TURNS_DO_NOT_ALTERNATE, "the first turn after a system turn is the user's")
    for before, after in pairwise(talk):
        # Tools may answer several at a time; people and models take turns.
        if before["role"] == after["role"] != "tool":
            raise Problem(Reason.TURNS_DO_NOT_ALTERNATE, f"two {after['role']} turns in a row")
    if any(not turn["content"].strip() for turn in talk):
        raise Problem(Reason.EMPTY_PROMPT, "a turn without text")


def _check_answers(row: Row, config: DataConfig) -> None:
    if row.chosen is not None and row.rejected is not None:
        for side, text in (("chosen", row.chosen), ("rejected", row.rejected)):
            _check_answer(side, text, config)
        if normalised_text(row.chosen) == normalised_text(row.rejected):
            raise Problem(Reason.IDENTICAL_SIDES)
    for item in row.responses or ():
        _check_answer("responses", item["text"], config)


def _check_answer(side: str, text: str, config: DataConfig) -> None:
    length = len(text.strip())
    if length == 0:
        raise Problem(Reason.EMPTY_ANSWER, side)
    if length < config.min_answer_characters:
        raise Problem(Reason.ANSWER_TOO_SHORT, f"{side}: fewer than {config.min_answer_characters} characters")
    if length > config.max_answer_characters:
        raise Problem(Reason.ANSWER_TOO_LONG, f"{side}: more than {config.max_answer_characters} characters")


class PairLedger:
    """Exact duplicates and contradicting labels, found by content while rows stream by.

    Remembers one hash and one number a row, never texts. Rows are numbered by the caller, from 0.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self.contradicted: set[int] = set()
        """Numbers of rows whose pair also occurs with the label turned round."""

    def is_duplicate(self, number: int, row: Row) -> bool:
        """Whether the same prompt and answers came before. A first occurrence is remembered under `number`."""
        answers = tuple(normalised_text(text) for text in row.answers())
        key = _key(row.prompt_id, *answers) if row.is_pair else _key(row.prompt_id, *sorted(answers))
        if key in self._first:
            return True
        self._first[key] = number
        if row.is_pair:
            turned = self._first.get(_key(row.prompt_id, *reversed(answers)))
            if turned is not None:
                self.contradicted |= {number, turned}
        return False


def _key(*texts: str) -> int:
    """128 bits of the texts' hash."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little")

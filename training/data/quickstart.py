"""The quickstart's data: small arithmetic questions whose true reward is known, a partition of pairs a night.

Two answers are drawn from a random writer who is often wrong, curt or long-winded; a noisy annotator prefers one; some
labels are turned round. Everything follows from (seed, night), so a night can be written again, byte for byte.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.schema.data import QuickstartConfig
from training.data.schema import Message
from training.rewards.quickstart import CLOSINGS, FILLERS, OPENINGS, OPERATIONS, RUDE, quickstart

SOURCE = "quickstart"
FILE_NAME = "pairs.parquet"
COLUMNS = ("prompt", "chosen", "rejected", "reference", "source", "category")
_WRITER_STREAM, _CORPUS_STREAM = 1, 2

QUESTIONS = (
    "What is {a} {word} {b}?",
    "Tell me, what is {a} {word} {b}?",
    "Compute {a} {word} {b}.",
    "How much is {a} {word} {b}?",
    "Please compute {a} {word} {b}.",
    "{a} {word} {b} is what?",
    "Can you compute {a} {word} {b}?",
    "Tell me how much {a} {word} {b} is.",
    "I want to know what {a} {word} {b} is.",
    "Please tell me what {a} {word} {b} is.",
)
GREETINGS = ("", "Hi! ", "Hello. ", "Hey! ")
# Few enough facts (some 55) for a model of a million weights to learn a part of them from one night's answers.
LARGEST = {"plus": 4, "minus": 5, "times": 2}

# Shares of the random writer. His mean gold reward is about 0.2, that of the better of two about 0.4.
CORRECT = 0.62
MISHEARD = 0.4  # of the wrong ones
COURTEOUS_OPENING = 0.45
COURTEOUS_CLOSING = 0.4
RUDE_OPENING = 0.2
FILLER = 0.3


@dataclass(frozen=True)
class Question:
    """A question, its kind, and its answer."""

    text: str
    category: str
    a: int
    b: int

    @property
    def answer(self) -> int:
        """The right number."""
        return OPERATIONS[self.category](self.a, self.b)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The question as chat messages."""
        return (Message(role="user", content=self.text),)


def generate(config: QuickstartConfig, seed: int, night_index: int) -> pa.Table:
    """Pairs of one night: columns prompt, chosen, rejected, reference, source, category (the operation)."""
    generator = _generator(seed, night_index, _WRITER_STREAM)
    columns: dict[str, list[str]] = {name: [] for name in COLUMNS}
    for _ in range(config.pairs_per_night):
        question = draw_question(generator)
        chosen, rejected = _draw_pair(question, config, generator)
        row = (question.text, chosen, rejected, str(question.answer), SOURCE, question.category)
        for name, value in zip(columns, row, strict=True):
            columns[name].append(value)
    return pa.table(columns)


def deliver(folder: Path, night_index: int, config: QuickstartConfig, seed: int) -> Path | None:
    """Write the partition of night `night_index` (from 0) below `folder`, and any earlier one that is missing.

    Returns that night's partition folder; None after the last night, when nothing new arrives. Repeating is harmless.
    """
    for index in range(min(night_index + 1, config.partitions)):
        partition = folder / partition_date(config, index).isoformat()
        if not (partition / FILE_NAME).exists():
            _write(generate(config, seed, index), partition)
    return folder / partition_date(config, night_index).isoformat() if night_index < config.partitions else None


def partition_date(config: QuickstartConfig, night_index: int) -> date:
    """The date that night's partition is named by."""
    return config.start_date + timedelta(days=night_index)


def corpus(seed: int, texts: int = 4_000) -> Iterator[str]:
    """Questions and answers alternately, to train a tokenizer on. Every word and number of the generator occurs."""
    for greeting in GREETINGS:
        yield from (greeting + question.format(a=7, word=word, b=8) for question in QUESTIONS for word in OPERATIONS)
    yield from (f"{phrase} {number}." for phrase in (*OPENINGS, *CLOSINGS, *FILLERS, *RUDE) for number in range(20))
    generator = _generator(seed, 0, _CORPUS_STREAM)
    for _ in range(texts // 2):
        question = draw_question(generator)
        yield question.text
        yield draw_answer(question, generator)


def draw_question(generator: np.random.Generator, category: str | None = None) -> Question:
    """A random question (of this kind, if one is given); its two numbers are at most LARGEST of its kind."""
    if category is None:
        category = str(generator.choice(list(OPERATIONS), p=[0.45, 0.35, 0.2]))
    largest = LARGEST[category]
    a, b = (int(number) for number in generator.integers(0, largest + 1, 2))
    if category == "minus":
        a, b = max(a, b), min(a, b)
    template = _pick(GREETINGS, generator) + _pick(QUESTIONS, generator)
    return Question(template.format(a=a, word=category, b=b), category, a, b)


def draw_answer(question: Question, generator: np.random.Generator) -> str:
    """One answer of the random writer, at most some twenty words."""
    parts = []
    mood = generator.random()
    if mood < COURTEOUS_OPENING:
        parts.append(_pick(OPENINGS, generator))
    elif mood < COURTEOUS_OPENING + RUDE_OPENING:
        parts.append(_pick(RUDE, generator))
    if generator.random() < FILLER:
        parts.append(_pick(FILLERS, generator))
    parts.append(_statement(question, generator))
    if generator.random() < COURTEOUS_CLOSING:
        parts.append(_pick(CLOSINGS, generator))
    return " ".join(parts)


def _statement(question: Question, generator: np.random.Generator) -> str:
    """The sum and its result. Wrong is a near miss, or the right result of a question that was misheard."""
    asked, number = question, question.answer
    if generator.random() >= CORRECT:
        if generator.random() < MISHEARD:
            asked = _misheard(question, generator)
            number = asked.answer
        else:
            # As people make them; never below zero, so that no sign has to be learned.
            number = abs(number + int(generator.choice([-3, -2, -1, 1, 2, 3])))
            number += number == question.answer
    return f"{asked.a} {asked.category} {asked.b} is {number}."


def _misheard(question: Question, generator: np.random.Generator) -> Question:
    """The same kind of question with other numbers."""
    while True:
        other = draw_question(generator, question.category)
        if (other.a, other.b) != (question.a, question.b):
            return other


def _draw_pair(question: Question, config: QuickstartConfig, generator: np.random.Generator) -> tuple[str, str]:
    """(chosen, rejected): the annotator compares gold with logistic noise; then the label may be turned round."""
    first = draw_answer(question, generator)
    second = draw_answer(question, generator)
    while second == first:
        second = draw_answer(question, generator)
    difference = quickstart(question.prompt, first, None) - quickstart(question.prompt, second, None)
    place = float(generator.uniform(1e-9, 1 - 1e-9))
    prefers_first = difference + config.label_noise * math.log(place / (1 - place)) > 0
    if generator.random() < config.flip_share:
        prefers_first = not prefers_first
    return (first, second) if prefers_first else (second, first)


def _pick(phrases: tuple[str, ...], generator: np.random.Generator) -> str:
    return phrases[int(generator.integers(len(phrases)))]


def _generator(seed: int, night_index: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, night_index, stream])))


def _write(table: pa.Table, partition: Path) -> None:
    """Whole or not at all: a half-written partition must never be read."""
    partition.mkdir(parents=True, exist_ok=True)
    temporary = partition / f".{FILE_NAME}.{os.getpid()}.tmp"
    pq.write_table(table, temporary, compression="zstd")
    os.replace(temporary, partition / FILE_NAME)

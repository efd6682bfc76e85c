"""MinHash against a slow oracle, and the laws of keeping the first of each kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.near_duplicates import (
    LikenessIndex,
    alike,
    band_keys,
    fields_of,
    jaccard,
    near_duplicates,
)

WORDS = [f"w{number}" for number in range(400)]
PINNED = 1165252074763177533


def oracle_jaccard(first: str, second: str) -> float:
    """Sets of word triples, straight from the definition."""

    def triples(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))} if words else set()

    a, b = triples(first), triples(second)
    return 1.0 if not a and not b else len(a & b) / len(a | b)


def near(texts: list[str], threshold: float = 0.8) -> list[bool]:
    fields = [fields_of(text) for text in texts]
    keys = np.stack([band_keys(item) for item in fields])
    return near_duplicates(keys, threshold, fields.__getitem__).tolist()


@given(
    st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=12),
    st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=12),
)
def test_jaccard_is_the_oracles(first: list[str], second: list[str]) -> None:
    a, b = " ".join(first), " ".join(second)
    assert jaccard(fields_of(a)[0], fields_of(b)[0]) == pytest.approx(oracle_jaccard(a, b))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_near_duplicates_are_the_greedy_oracles(seed: int) -> None:
    generator = np.random.default_rng(seed)
    texts: list[str] = []
    for _ in range(30):
        if texts and generator.random() < 0.5:
            words = texts[int(generator.integers(len(texts)))].split()
            for _ in range(int(generator.integers(0, 4))):
                words[int(generator.integers(len(words)))] = str(generator.choice(WORDS))
        else:
            words = list(generator.choice(WORDS, 60))
        texts.append(" ".join(words))
    kept: list[str] = []
    expected = []
    for text in texts:
        expected.append(any(oracle_jaccard(text, other) >= 0.8 for other in kept))
        if not expected[-1]:
            kept.append(text)
    assert near(texts) == expected


def test_case_spaces_and_unicode_form_do_not_hide_a_copy() -> None:
    text = "The café is closed on Mondays, so we went to the other one near the river."
    assert near([text, "  " + text.upper().replace(" ", "\n"), text.replace("é", "e\u0301")]) == [False, True, True]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("What is 12 + 7?", "What is 12 - 7?"),
        ("What is 3 plus 4?", "What is 3 plus 5?"),
        ("yes", "no"),
        ("", "no"),
    ],
)
def test_short_questions_that_differ_in_a_sign_or_digit_are_different(first: str, second: str) -> None:
    assert near([first, second]) == [False, False]


def test_a_long_shared_prompt_does_not_make_answers_alike() -> None:
    prompt = " ".join(WORDS[:200])
    one = fields_of(prompt, "I would rather not say", "Of course I will tell you")
    other = fields_of(prompt, "Here is the plan of the house", "No idea at all sorry")
    assert not alike(one, other, 0.5)
    assert alike(one, one, 1.0)
    assert not alike(one, fields_of(prompt), 0.5)


def test_the_same_words_in_another_field_are_not_alike() -> None:
    assert jaccard(fields_of("a b c d", "x")[0], fields_of("x", "a b c d")[1]) == 0.0


def test_index_of_evaluation_prompts() -> None:
    index = LikenessIndex(0.8)
    held = " ".join(WORDS[:50])
    index.add(fields_of(held), band_keys(fields_of(held)))

    def has(text: str) -> bool:
        return index.has_like(fields_of(text), band_keys(fields_of(text)))

    assert has(held)
    assert has(" ".join(WORDS[:45]))
    assert not has(" ".join(WORDS[25:75]))


def test_hashes_are_fixed() -> None:
    """A change of the hash would change what earlier nights dropped: it must be deliberate."""
    assert fields_of("one two three four")[0].tolist() == sorted(fields_of("one two three four")[0].tolist())
    assert int(band_keys(fields_of("one two three four"))[0]) == PINNED


def test_nothing_to_compare() -> None:
    assert near_duplicates(np.empty((0, 24), dtype=np.uint64), 0.8, lambda number: ()).tolist() == []

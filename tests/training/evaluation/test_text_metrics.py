from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.evaluation.text_metrics import (
    corpus_distinct,
    distinct_2,
    distinct_n,
    length_ratio,
    repetition_share,
    words,
)

tokens = st.lists(st.integers(0, 4), max_size=25)


@pytest.mark.parametrize(
    ("text", "distinct", "repeated"),
    [
        ("the cat sat on the mat", 1.0, 0.0),
        ("yes yes yes yes", 1 / 3, 3 / 4),
        ("a b c a b c", 3 / 5, 0.5),
        ("word", 1.0, 0.0),
        ("", 0.0, 0.0),
        ("The the THE", 0.5, 0.0),
    ],
)
def test_by_hand(text, distinct, repeated):
    assert distinct_2(words(text)) == pytest.approx(distinct)
    assert repetition_share(words(text)) == pytest.approx(repeated)


@given(tokens, st.integers(1, 4))
def test_against_slow_counting(answer, n):
    grams = [answer[i : i + n] for i in range(max(0, len(answer) - n + 1))]
    different = [g for i, g in enumerate(grams) if g not in grams[:i]]
    expected = len(different) / len(grams) if grams else float(bool(answer))
    assert distinct_n(answer, n) == pytest.approx(expected)
    covered = {i + k for i, g in enumerate(grams) if g in grams[:i] for k in range(n)}
    assert repetition_share(answer, n) == pytest.approx(len(covered) / len(answer) if answer else 0.0)


@given(st.lists(tokens, max_size=6))
def test_corpus_distinct_counts_each_ngram_once(answers):
    ours, counts = corpus_distinct(answers)
    pairs = [(a[i], a[i + 1]) for a in answers for i in range(len(a) - 1)]
    assert sum(ours) == pytest.approx(len(set(pairs)))
    assert sum(counts) == len(pairs)
    assert len(ours) == len(counts) == len(answers)


def test_corpus_distinct_sees_one_answer_to_all_prompts():
    varied, same = [list(range(i, i + 5)) for i in range(0, 50, 5)], [list(range(5))] * 10
    assert all(distinct_2(answer) == 1.0 for answer in varied + same)
    shares = [sum(ours) / sum(counts) for ours, counts in (corpus_distinct(varied), corpus_distinct(same))]
    assert shares == [pytest.approx(1.0), pytest.approx(0.1)]


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [
        ([4, 6], [10], 0.5),
        ([0], [3], 0.0),
        ([3], [0, 0], math.inf),
        ([0], [0], math.nan),
        ([], [1], math.nan),
        ([1], [], math.nan),
    ],
)
def test_length_ratio(ours, theirs, ratio):
    assert length_ratio(ours, theirs) == pytest.approx(ratio, nan_ok=True)


def test_ngrams_of_nothing_are_refused():
    with pytest.raises(ValueError, match="n >= 1"):
        distinct_n([1, 2], 0)

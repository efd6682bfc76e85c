"""What answers look like, without any model: variety, repetition, length. Pure; tokens may be ids or words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

Tokens = Sequence[Hashable]


def words(text: str) -> list[str]:
    """Lower-cased words, cut at white space: tokens where no tokenizer is at hand."""
    return text.lower().split()


def distinct_n(tokens: Tokens, n: int = 2) -> float:
    """Share of one answer's n-grams that differ from each other, in [0, 1]; 1 is most varied.

    An answer too short for one n-gram repeats nothing (1), but an empty answer has no variety (0).
    Source: Li et al. 2016, A Diversity-Promoting Objective Function, section 5.3.
    """
    grams = _ngrams(tokens, n)
    if not grams:
        return 1.0 if tokens else 0.0
    return len(set(grams)) / len(grams)


def distinct_2(tokens: Tokens) -> float:
    """`distinct_n` of pairs."""
    return distinct_n(tokens, 2)


def corpus_distinct(answers: Sequence[Tokens], n: int = 2) -> tuple[list[float], list[float]]:
    """Distinct-n over all answers together, as (numerators, denominators), one each an answer.

    Sum over sum is the number of different n-grams by their number: it falls when all prompts get the same answer,
    which `distinct_n` alone cannot see. Each n-gram's one point is shared equally by its occurrences.
    """
    grams = [_ngrams(tokens, n) for tokens in answers]
    seen = Counter(gram for own in grams for gram in own)
    return [sum(1 / seen[gram] for gram in own) for own in grams], [float(len(own)) for own in grams]


def repetition_share(tokens: Tokens, n: int = 3) -> float:
    """Share of one answer's tokens inside an n-gram that occurred before in it, in [0, 1]; 0 repeats nothing."""
    seen: set[tuple[Hashable, ...]] = set()
    covered: set[int] = set()
    for start, gram in enumerate(_ngrams(tokens, n)):
        if gram in seen:
            covered.update(range(start, start + n))
        seen.add(gram)
    return len(covered) / len(tokens) if tokens else 0.0


def length_ratio(challenger_lengths: Sequence[int], baseline_lengths: Sequence[int]) -> float:
    """Mean answer length of the challenger by the baseline's, in tokens. NaN of nothing; inf where only the baseline is
    empty.
    """
    if not challenger_lengths or not baseline_lengths:
        return float("nan")
    ours = sum(challenger_lengths) / len(challenger_lengths)
    theirs = sum(baseline_lengths) / len(baseline_lengths)
    if theirs == 0:
        return float("nan") if ours == 0 else float("inf")
    return ours / theirs


def _ngrams(tokens: Tokens, n: int) -> list[tuple[Hashable, ...]]:
    if n < 1:
        raise ValueError(f"n-grams need n >= 1, got {n}")
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]

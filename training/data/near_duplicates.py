"""Which texts are nearly the same: three-word shingles, MinHash to find candidates, exact Jaccard to decide.

MinHash and banding after Broder (1997), "On the resemblance and containment of documents", and Indyk & Motwani (1998).
Hashes are fixed functions of the text, so the same rows give the same verdict on every machine and night.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from training.data.schema import normalised_text

Shingles = npt.NDArray[np.uint32]
"""Sorted distinct hashes of one text's shingles."""
Fields = tuple[Shingles, ...]
"""Shingles of the texts that make up one thing: a prompt alone, or prompt and answers of a row."""
BandKeys = npt.NDArray[np.uint64]
"""[BANDS]: things that share a key in a band are candidates."""

SHINGLE_WORDS = 3
# 24 bands of 4: two texts of likeness 0.8 meet with probability 1 - (1 - 0.8^4)^24 > 0.99999, of 0.5 with 0.79.
BANDS, ROWS_PER_BAND = 24, 4
# A boilerplate bucket must not cost n^2: a text is compared with at most this many earlier ones in a band.
MAX_COMPARED = 64

# Digits and signs are words of their own: "12 + 7" and "12 - 7" are different questions.
_WORD = re.compile(r"\w+|[^\w\s]")
_PRIME = np.uint64((1 << 31) - 1)


def _coefficients() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    generator = np.random.Generator(np.random.PCG64(20_240_517))
    size = BANDS * ROWS_PER_BAND
    high = int(_PRIME)
    return generator.integers(1, high, size, dtype=np.uint64), generator.integers(0, high, size, dtype=np.uint64)


_A, _B = _coefficients()


def fields_of(*texts: str) -> Fields:
    """Shingles of each text. The same words in another field are another shingle: prompt and answer never mix.

    A text shorter than three words is one shingle; an empty one has none.
    """
    return tuple(np.unique(_shingles(text, index)) for index, text in enumerate(texts))


def _shingles(text: str, index: int) -> npt.NDArray[np.uint32]:
    words = _WORD.findall(normalised_text(text))
    if not words:
        return np.empty(0, dtype=np.uint32)
    hashes = np.fromiter((zlib.crc32(word.encode()) for word in words), dtype=np.uint64, count=len(words))
    width = min(SHINGLE_WORDS, len(words))
    mixed = np.full(len(words) - width + 1, index + 1, dtype=np.uint64)
    for offset in range(width):
        mixed = (mixed * np.uint64(0x9E3779B97F4A7C15)) ^ hashes[offset : offset + len(mixed)]
        mixed ^= mixed >> np.uint64(29)
    return (mixed * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(32)).astype(np.uint32)


def jaccard(first: Shingles, second: Shingles) -> float:
    """Shared shingles over all shingles of two texts; two empty texts are alike."""
    if not len(first) and not len(second):
        return 1.0
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def alike(first: Fields, second: Fields, threshold: float) -> bool:
    """Whether every field has at least that Jaccard likeness: a long shared prompt does not make two answers alike."""
    if len(first) != len(second):
        return False
    return all(jaccard(a, b) >= threshold for a, b in zip(first, second, strict=True))


def band_keys(fields: Fields) -> BandKeys:
    """Keys under which things of a likeness of at least about 0.7 meet almost surely."""
    text = np.concatenate(fields)
    if not len(text):
        return np.full(BANDS, np.iinfo(np.uint64).max, dtype=np.uint64)
    small = text.astype(np.uint64) % _PRIME
    signature = ((small[:, None] * _A + _B) % _PRIME).min(axis=0).reshape(BANDS, ROWS_PER_BAND)
    keys = np.zeros(BANDS, dtype=np.uint64)
    for column in range(ROWS_PER_BAND):
        keys = (keys * np.uint64(0x9E3779B97F4A7C15)) ^ signature[:, column]
        keys ^= keys >> np.uint64(31)
    return keys


class LikenessIndex:
    """Things that were added, and whether a new one is nearly the same as one of them."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._held: list[Fields] = []
        self._buckets: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(BANDS)]

    def add(self, fields: Fields, keys: BandKeys) -> None:
        """Remember a thing under its band keys."""
        for bucket, key in zip(self._buckets, keys.tolist(), strict=True):
            bucket[key].append(len(self._held))
        self._held.append(fields)

    def has_like(self, fields: Fields, keys: BandKeys) -> bool:
        """Whether some added thing has at least the threshold's likeness."""
        compared: set[int] = set()
        for bucket, key in zip(self._buckets, keys.tolist(), strict=True):
            for number in bucket.get(key, ())[:MAX_COMPARED]:
                if number not in compared:
                    compared.add(number)
                    if alike(fields, self._held[number], self._threshold):
                        return True
        return False


def near_duplicates(
    keys: npt.NDArray[np.uint64], threshold: float, fetch: Callable[[int], Fields]
) -> npt.NDArray[np.bool_]:
    """[rows], True where a row is nearly the same as an earlier one that is itself kept.

    `keys` is [rows, BANDS]; `fetch(number)` gives the shingles of a row and is asked for candidates alone.
    """
    dropped = np.zeros(len(keys), dtype=bool)
    index = LikenessIndex(threshold)
    for number in _candidates(keys).tolist():
        fields = fetch(number)
        if index.has_like(fields, keys[number]):
            dropped[number] = True
        else:
            index.add(fields, keys[number])
    return dropped


def _candidates(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Rows that meet another one in some band."""
    repeated = np.zeros(len(keys), dtype=bool)
    for band in range(keys.shape[1] if len(keys) else 0):
        _, inverse, counts = np.unique(keys[:, band], return_inverse=True, return_counts=True)
        repeated |= counts[inverse] > 1
    return np.flatnonzero(repeated)

"""How many sequences go through the network at once: runs of items that never exceed a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from training.errors import DataError


class Size(NamedTuple):
    """What one item takes: rows, longest row, and for `packed` the lengths of its sequences, which may share rows."""

    rows: int
    longest: int
    packed: tuple[int, ...] | None = None


def first_fit(lengths: Sequence[int], width: int) -> list[int]:
    """The row of each sequence: the first of `width` tokens with room for it. Johnson 1973: at most 1.7 x the best."""
    rows = _Rows(width)
    return [rows.add(length) for length in lengths]


class _Rows:
    """Rows of one width being filled."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.room: list[int] = []

    def add(self, length: int) -> int:
        for row, room in enumerate(self.room):
            if length <= room:
                self.room[row] -= length
                return row
        self.room.append(self.width - length)
        return len(self.room) - 1


def microbatches(
    sizes: Sequence[tuple[int, int] | Size], budget: int, names: Sequence[str] | None = None, most: int | None = None
) -> list[list[int]]:
    """Split items into runs whose size with padding never exceeds `budget` tokens, nor their number `most`.

    `sizes[i]`: (rows, longest row) of item i, or its `Size`. Items are taken longest first, so that padding is small;
    the order is a pure function of the sizes. Laid out in the order of a run, its items take what was counted here.
    Raises DataError naming an item that alone exceeds the budget.
    """
    items = [Size(*size) for size in sizes]
    batches: list[list[int]] = []
    load = _Load(0)
    for i in sorted(range(len(items)), key=lambda i: (-items[i].longest, i)):
        size = items[i]
        if size.rows * size.longest > budget:
            name = names[i] if names is not None else f"item {i}"
            raise DataError(
                f"{name}: {size.rows} x {size.longest} tokens exceed the budget of {budget} tokens a microbatch",
                "raise the token budget or lower models.max_prompt_length / max_response_length",
            )
        has_room = bool(batches) and (most is None or len(batches[-1]) < most)
        if has_room and load.tokens_with(size) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
            load = _Load(size.longest)
        load.add(size)
    return batches


class _Load:
    """Slots of a microbatch in the making. The first item is the longest, so the width of its rows is known."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.shared = width, 0, _Rows(width)

    def tokens_with(self, size: Size) -> int:
        if size.packed is None:
            return (self.rows + size.rows) * self.width
        trial = _Rows(self.width)
        trial.room = list(self.shared.room)
        for length in size.packed:
            trial.add(length)
        return (self.rows + len(trial.room)) * self.width

    def add(self, size: Size) -> None:
        if size.packed is None:
            self.rows += size.rows
        else:
            for length in size.packed:
                self.shared.add(length)

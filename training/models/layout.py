"""How groups of sequences lie in a tensor. One module decides, so that no loop and no loss knows.

Alphabet: N rows, L tokens a row, B responses, R response positions. All layouts give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from training.errors import DataError


@dataclass(frozen=True)
class Group:
    """One prompt and its responses, as token ids. Example: Group((1, 5, 6), ((7, 2), (8, 9, 2)))."""

    prompt_ids: Sequence[int]
    responses: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Layout:
    """Tensors for one forward, and where the responses are in them.

    `row`, `positions`: for response b, hidden state r (0..R) lies at [row[b], positions[b, r]]; position 0 is the
    prompt's last token, whose state predicts response token 0; position r is response token r-1.
    """

    input_ids: torch.Tensor  # [N, L] int64
    position_ids: torch.Tensor  # [N, L] int64
    attention: torch.Tensor | None  # None: causal; else float [N, 1, L, L], 0 where attended, lowest value elsewhere
    row: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B, R + 1] int64
    response_ids: torch.Tensor  # [B, R] int64, 0 in masked slots
    response_mask: torch.Tensor  # [B, R] bool

    @property
    def num_tokens(self) -> int:
        """Slots of the forward, padding included: what a token budget counts."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> Layout:
        """The same layout on `device`."""
        attention = None if self.attention is None else self.attention.to(device)
        moved = {name: value.to(device) for name, value in vars(self).items() if name != "attention"}
        return Layout(attention=attention, **moved)


def build_layout(groups: Sequence[Group], kind: str, pad_id: int) -> Layout:
    """`padded`: a row a response; `shared`: a row a group, its prompt stored once."""
    rows = [_shared_row(group) for group in groups] if kind == "shared" else _padded_rows(groups)
    return _assemble(rows, pad_id, blocks=kind == "shared")


def resolve_layout(kind: str, groups: Sequence[Group]) -> str:
    """What `auto` means for these groups: shared where it saves a fifth of the tokens, since block masks cost too."""
    if kind != "auto":
        return kind
    slots = {
        layout: sum(height * length for height, length in map(_size(layout), groups)) for layout in ("padded", "shared")
    }
    return "shared" if slots["shared"] < 0.8 * slots["padded"] else "padded"


def group_sizes(groups: Sequence[Group], kind: str) -> list[tuple[int, int]]:
    """(rows, longest row) that each group takes in a layout of this kind: what `microbatches` wants to know."""
    return list(map(_size(kind), groups))


def _size(kind: str) -> Callable[[Group], tuple[int, int]]:
    def padded(group: Group) -> tuple[int, int]:
        return len(group.responses), len(group.prompt_ids) + max(len(r) for r in group.responses)

    def shared(group: Group) -> tuple[int, int]:
        return 1, len(group.prompt_ids) + sum(len(r) for r in group.responses)

    return shared if kind == "shared" else padded


@dataclass(frozen=True)
class _Row:
    tokens: list[int]
    position_ids: list[int]
    starts: list[int]  # where each response begins in the row
    lengths: list[int]
    prompt_length: int


def _shared_row(group: Group) -> _Row:
    tokens, position_ids = list(group.prompt_ids), list(range(len(group.prompt_ids)))
    starts = []
    for response in group.responses:
        starts.append(len(tokens))
        tokens += response
        position_ids += range(len(group.prompt_ids), len(group.prompt_ids) + len(response))
    return _Row(tokens, position_ids, starts, [len(r) for r in group.responses], len(group.prompt_ids))


def _padded_rows(groups: Sequence[Group]) -> list[_Row]:
    return [_shared_row(Group(group.prompt_ids, (response,))) for group in groups for response in group.responses]


def _assemble(rows: Sequence[_Row], pad_id: int, blocks: bool) -> Layout:
    length = max(len(row.tokens) for row in rows)
    width = max(max(row.lengths) for row in rows)
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    position_ids = torch.zeros((len(rows), length), dtype=torch.int64)
    count = sum(len(row.starts) for row in rows)
    row_of = torch.empty(count, dtype=torch.int64)
    positions = torch.zeros((count, width + 1), dtype=torch.int64)
    response_ids = torch.zeros((count, width), dtype=torch.int64)
    response_mask = torch.zeros((count, width), dtype=torch.bool)
    b = 0
    for n, row in enumerate(rows):
        input_ids[n, : len(row.tokens)] = torch.tensor(row.tokens)
        position_ids[n, : len(row.tokens)] = torch.tensor(row.position_ids)
        for start, size in zip(row.starts, row.lengths, strict=True):
            row_of[b] = n
            positions[b, 0] = row.prompt_length - 1
            positions[b, 1 : size + 1] = torch.arange(start, start + size)
            response_ids[b, :size] = input_ids[n, start : start + size]
            response_mask[b, :size] = True
            b += 1
    # Right padding under a causal mask needs no mask of its own: no valid token looks to the right.
    attention = _block_mask(rows, length) if blocks else None
    return Layout(input_ids, position_ids, attention, row_of, positions, response_ids, response_mask)


def _block_mask(rows: Sequence[_Row], length: int) -> torch.Tensor:
    """Causal, and a response sees its prompt and itself, never a sibling. Padded slots see themselves only."""
    block = torch.full((len(rows), length), -1, dtype=torch.int64)
    for n, row in enumerate(rows):
        block[n, : row.prompt_length] = 0
        for i, (start, size) in enumerate(zip(row.starts, row.lengths, strict=True)):
            block[n, start : start + size] = i + 1
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    query, key = block[:, :, None], block[:, None, :]
    allowed = causal & ((query == key) | ((key == 0) & (query > 0))) & (query >= 0)
    allowed |= torch.eye(length, dtype=torch.bool)
    lowest = torch.finfo(torch.float32).min
    return torch.where(allowed, 0.0, lowest)[:, None]


def microbatches(
    sizes: Sequence[tuple[int, int]], budget: int, names: Sequence[str] | None = None, most: int | None = None
) -> list[list[int]]:
    """Split items into runs whose padded size never exceeds `budget` tokens, nor their number `most`.

    `sizes[i]` = (rows, longest row) of item i. Items are taken longest first, so that padding is small; the order is
    a pure function of the sizes. Raises DataError naming an item that alone exceeds the budget.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i][1], i))
    batches: list[list[int]] = []
    rows, longest = 0, 0
    for i in order:
        height, length = sizes[i]
        if height * length > budget:
            name = names[i] if names is not None else f"item {i}"
            raise DataError(
                f"{name}: {height} x {length} tokens exceed the budget of {budget} tokens a microbatch",
                "raise the token budget or lower models.max_prompt_length / max_response_length",
            )
        has_room = bool(batches) and (most is None or len(batches[-1]) < most)
        if has_room and (rows + height) * max(longest, length) <= budget:
            batches[-1].append(i)
            rows, longest = rows + height, max(longest, length)
        else:
            batches.append([i])
            rows, longest = height, length
    return batches

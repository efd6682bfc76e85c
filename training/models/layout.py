"""How groups of sequences lie in a tensor. One module decides, so that no loop and no loss knows.

    padded   a row a response, its prompt in front of it
    shared   a row a group: the prompt once, its responses behind one another
    packed   rows of the longest sequence's length, each filled with whole sequences that do not see one another

Alphabet: N rows, L tokens a row, B responses, R response positions. All layouts give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from training.models.batching import Size, first_fit


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
    """`padded`, `shared` or `packed` rows of these groups. Responses stay in the groups' order."""
    if kind == "shared":
        rows = _shared_rows(groups)
    else:
        sequences = [(group.prompt_ids, response) for group in groups for response in group.responses]
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        places = first_fit(lengths, max(lengths)) if kind == "packed" else range(len(sequences))
        rows = _sequence_rows(sequences, places)
    return _assemble(rows, pad_id, blocks=kind != "padded")


def resolve_layout(kind: str, groups: Sequence[Group]) -> str:
    """What `auto` means for these groups: shared where it saves a fifth of the tokens, since block masks cost too."""
    if kind != "auto":
        return kind
    slots = {
        layout: sum(size.rows * size.longest for size in group_sizes(groups, layout)) for layout in ("padded", "shared")
    }
    return "shared" if slots["shared"] < 0.8 * slots["padded"] else "padded"


def group_sizes(groups: Sequence[Group], kind: str) -> list[Size]:
    """What each group takes in a layout of this kind: what `microbatches` wants to know."""
    return [_size(group, kind) for group in groups]


def _size(group: Group, kind: str) -> Size:
    prompt = len(group.prompt_ids)
    if kind == "shared":
        return Size(1, prompt + sum(len(r) for r in group.responses))
    lengths = tuple(prompt + len(r) for r in group.responses)
    if kind == "packed":
        return Size(max(first_fit(lengths, max(lengths))) + 1, max(lengths), lengths)
    return Size(len(lengths), max(lengths))


class _Piece(NamedTuple):
    """A response in a row: its number, where its prompt ends, where it begins, how long it is, and what it may see."""

    response: int
    prompt_end: int
    start: int
    size: int
    block: int  # where the sequence's own tokens begin; below it only the prompt that all of the row share


@dataclass
class _Row:
    tokens: list[int]
    position_ids: list[int]
    pieces: list[_Piece]
    shared_prompt: int = 0  # tokens at the row's start that every piece sees


def _shared_rows(groups: Sequence[Group]) -> list[_Row]:
    rows, number = [], 0
    for group in groups:
        prompt = len(group.prompt_ids)
        row = _Row(list(group.prompt_ids), list(range(prompt)), [], prompt)
        for response in group.responses:
            start = len(row.tokens)
            row.pieces.append(_Piece(number, prompt, start, len(response), start))
            row.tokens += response
            row.position_ids += range(prompt, prompt + len(response))
            number += 1
        rows.append(row)
    return rows


def _sequence_rows(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], places: Sequence[int]) -> list[_Row]:
    """Rows of whole sequences: sequence i lies in row places[i], positions counted anew for each."""
    rows = [_Row([], [], []) for _ in range(max(places) + 1)]
    for number, ((prompt, response), place) in enumerate(zip(sequences, places, strict=True)):
        row, begin = rows[place], len(rows[place].tokens)
        start = begin + len(prompt)
        row.pieces.append(_Piece(number, start, start, len(response), begin))
        row.tokens += [*prompt, *response]
        row.position_ids += range(len(prompt) + len(response))
    return rows


def _assemble(rows: Sequence[_Row], pad_id: int, blocks: bool) -> Layout:
    length = max(len(row.tokens) for row in rows)
    pieces = [(n, piece) for n, row in enumerate(rows) for piece in row.pieces]
    width = max(piece.size for _, piece in pieces)
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    position_ids = torch.zeros((len(rows), length), dtype=torch.int64)
    for n, row in enumerate(rows):
        input_ids[n, : len(row.tokens)] = torch.tensor(row.tokens)
        position_ids[n, : len(row.tokens)] = torch.tensor(row.position_ids)
    row_of = torch.empty(len(pieces), dtype=torch.int64)
    positions = torch.zeros((len(pieces), width + 1), dtype=torch.int64)
    response_ids = torch.zeros((len(pieces), width), dtype=torch.int64)
    response_mask = torch.zeros((len(pieces), width), dtype=torch.bool)
    for n, (b, prompt_end, start, size, _) in pieces:
        row_of[b] = n
        positions[b, 0] = prompt_end - 1
        positions[b, 1 : size + 1] = torch.arange(start, start + size)
        response_ids[b, :size] = input_ids[n, start : start + size]
        response_mask[b, :size] = True
    # Right padding under a causal mask needs no mask of its own: no valid token looks to the right.
    attention = _block_mask(rows, length) if blocks else None
    return Layout(input_ids, position_ids, attention, row_of, positions, response_ids, response_mask)


def _block_mask(rows: Sequence[_Row], length: int) -> torch.Tensor:
    """Causal, and a sequence sees itself and the prompt its row shares, never a neighbour. Padding sees itself only."""
    block = torch.full((len(rows), length), -1, dtype=torch.int64)
    for n, row in enumerate(rows):
        block[n, : row.shared_prompt] = 0
        for i, piece in enumerate(row.pieces):
            block[n, piece.block : piece.start + piece.size] = i + 1
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    query, key = block[:, :, None], block[:, None, :]
    allowed = causal & ((query == key) | ((key == 0) & (query > 0))) & (query >= 0)
    allowed |= torch.eye(length, dtype=torch.bool)
    lowest = torch.finfo(torch.float32).min
    return torch.where(allowed, 0.0, lowest)[:, None]

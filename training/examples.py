"""Rows of a snapshot as token groups: pairs, texts to imitate, prompts. What does not survive is counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from configs.schema.models import ModelsConfig
from training.models.layout import Group
from training.models.tokenize import EncodedResponse, encode_prompt, encode_response


@dataclass(frozen=True)
class Pair:
    """A preference as tokens: `group.responses` are (chosen, rejected). Example: Pair("r1", Group(...), 1.0)."""

    row_id: str
    group: Group
    weight: float


@dataclass(frozen=True)
class Prompt:
    """A question as tokens, with what rules need to judge an answer."""

    prompt_id: str
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...]
    reference: str | None
    source: str
    category: str


@dataclass(frozen=True)
class Answer:
    """A stored answer to a prompt: tokens, whether it ends, who wrote it, and its recorded reward if there is one."""

    prompt: Prompt
    response: EncodedResponse
    text: str
    writer: str
    reward: float | None


def read_split(snapshot: Path, split: str) -> list[dict[str, Any]]:
    """Rows of `train`, `validation` or `evaluation`."""
    rows: list[dict[str, Any]] = pq.read_table(snapshot / f"{split}.parquet").to_pylist()
    return rows


class Encoder:
    """A tokenizer with the night's length limits."""

    def __init__(self, tokenizer: Any, models: ModelsConfig) -> None:
        self.tokenizer = tokenizer
        self.models = models

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of a row."""
        messages = tuple(row["prompt"])
        ids = encode_prompt(self.tokenizer, messages, self.models.max_prompt_length, self.models.chat_template)
        return Prompt(row["prompt_id"], tuple(ids), messages, row.get("reference"), row["source"], row["category"])

    def response(self, text: str, finished: bool = True) -> EncodedResponse:
        """A response, cut to the limit; without EOS where its writer did not finish it."""
        models = self.models
        return encode_response(self.tokenizer, text, models.max_response_length, models.chat_template, finished)


def encode_pairs(rows: Iterable[Mapping[str, Any]], encoder: Encoder) -> tuple[list[Pair], Counter[str]]:
    """Pairs, and how many rows were dropped for which reason (no_pair, empty_side, equal, equal_after_truncation).

    A row that a policy has written may carry `finished`, two booleans: whether either side came to an end.
    """
    pairs, dropped = [], Counter[str]()
    for row in rows:
        reason, pair = _encode_pair(row, encoder)
        if pair is None:
            dropped[reason] += 1
        else:
            pairs.append(pair)
    return pairs, dropped


def _encode_pair(row: Mapping[str, Any], encoder: Encoder) -> tuple[str, Pair | None]:
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        return "no_pair", None
    if not chosen.strip() or not rejected.strip():
        return "empty_side", None
    ends = row.get("finished", (True, True))
    sides = (encoder.response(chosen, ends[0]).token_ids, encoder.response(rejected, ends[1]).token_ids)
    if not sides[0] or not sides[1]:
        return "empty_side", None
    if sides[0] == sides[1]:
        return ("equal" if chosen.strip() == rejected.strip() else "equal_after_truncation"), None
    return "", Pair(row["row_id"], Group(encoder.prompt(row).token_ids, sides), float(row["label_weight"]))


def encode_imitation(rows: Iterable[Mapping[str, Any]], encoder: Encoder) -> tuple[list[str], list[Group]]:
    """Texts to imitate: chosen answers; of stored answers the best rewarded one. Names and groups of one response."""
    names, groups = [], []
    for row in rows:
        text = row.get("chosen") or _best_answer(row.get("responses") or [])
        if text and text.strip():
            names.append(row["row_id"])
            groups.append(Group(encoder.prompt(row).token_ids, (encoder.response(text).token_ids,)))
    return names, groups


def _best_answer(responses: Sequence[Mapping[str, Any]]) -> str | None:
    rewarded = [r for r in responses if r["reward"] is not None]
    return str(max(rewarded, key=lambda r: r["reward"])["text"]) if rewarded else None


def encode_answers(rows: Iterable[Mapping[str, Any]], encoder: Encoder) -> list[Answer]:
    """Every stored answer of every row: both sides of a pair, and all responses."""
    answers = []
    for row in rows:
        prompt = encoder.prompt(row)
        stored = [(row.get("chosen"), "chosen", None), (row.get("rejected"), "rejected", None)]
        stored += [(r["text"], r["source"], r["reward"]) for r in row.get("responses") or []]
        for text, writer, reward in stored:
            if text and text.strip():
                answers.append(Answer(prompt, encoder.response(text), text, writer, reward))
    return answers


def encode_prompts(rows: Iterable[Mapping[str, Any]], encoder: Encoder, limit: int | None = None) -> list[Prompt]:
    """Distinct prompts in row order, at most `limit`."""
    found: dict[str, Prompt] = {}
    for row in rows:
        if limit is not None and len(found) >= limit:
            break
        if row["prompt_id"] not in found:
            found[row["prompt_id"]] = encoder.prompt(row)
    return list(found.values())

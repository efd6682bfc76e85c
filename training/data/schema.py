"""The one shape of a row: what every format is turned into, and what snapshots hold."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import pyarrow as pa

SCHEMA_VERSION = 2

CHOSEN, REJECTED, NO_LABEL = "chosen", "rejected", "none"
LABELS = (CHOSEN, REJECTED, NO_LABEL)
"""Which delivered side a label named the better one; `none`: the columns' names say it, or there is no pair."""


class Message(TypedDict):
    """One turn of a chat, as chat templates take it. role: system, user, assistant or tool."""

    role: str
    content: str


class StoredResponse(TypedDict):
    """One stored answer to the row's prompt; reward is None where none was recorded."""

    text: str
    source: str
    reward: float | None


ROW_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("chosen", pa.string()),
        pa.field("rejected", pa.string()),
        pa.field(
            "responses", pa.list_(pa.struct([("text", pa.string()), ("source", pa.string()), ("reward", pa.float32())]))
        ),
        pa.field("reference", pa.string()),
        pa.field("label", pa.string()),
        pa.field("label_weight", pa.float32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("partition", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Row:
    """One normalised row.

    A preference row has `chosen` and `rejected`; a trajectory row has `responses`, several answers to one prompt.
    `label` is one of LABELS: after `rejected` the sides were exchanged. `label_weight` is the trust in it, in (0, 1].
    """

    prompt: tuple[Message, ...]
    chosen: str | None = None
    rejected: str | None = None
    responses: tuple[StoredResponse, ...] | None = None
    reference: str | None = None
    label: str = NO_LABEL
    label_weight: float = 1.0
    source: str = "unknown"
    category: str = "none"
    partition: str = ""

    @cached_property
    def prompt_id(self) -> str:
        """sha256 of the normalised prompt."""
        return prompt_id(self.prompt)

    @cached_property
    def row_id(self) -> str:
        """32 hex digits of the content: the same row delivered twice has the same id wherever it lies."""
        answers = [[item["text"], item["source"], item["reward"]] for item in self.responses or ()]
        return _digest([self.prompt_id, self.chosen, self.rejected, answers, self.reference])[:32]

    @property
    def is_pair(self) -> bool:
        """Whether this is a preference row."""
        return self.chosen is not None and self.rejected is not None

    @property
    def prompt_text(self) -> str:
        """All turns of the prompt as one text: for likeness and lengths, never for training."""
        return " ".join(turn["content"] for turn in self.prompt)

    def answers(self) -> tuple[str, ...]:
        """Every answer text of the row: the pair's sides, then the stored responses."""
        sides = tuple(side for side in (self.chosen, self.rejected) if side is not None)
        return sides + tuple(item["text"] for item in self.responses or ())

    def record(self) -> dict[str, Any]:
        """The row as ROW_SCHEMA wants it."""
        return {
            "row_id": self.row_id,
            "prompt": list(self.prompt),
            "prompt_id": self.prompt_id,
            "chosen": self.chosen,
            "rejected": self.rejected,
            "responses": None if self.responses is None else list(self.responses),
            "reference": self.reference,
            "label": self.label,
            "label_weight": self.label_weight,
            "source": self.source,
            "category": self.category,
            "partition": self.partition,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Row:
        """The inverse of `record`; the two ids are computed, not read."""
        responses = record["responses"]
        return cls(
            prompt=tuple(Message(role=turn["role"], content=turn["content"]) for turn in record["prompt"]),
            chosen=record["chosen"],
            rejected=record["rejected"],
            responses=None
            if responses is None
            else tuple(
                StoredResponse(text=item["text"], source=item["source"], reward=item["reward"]) for item in responses
            ),
            reference=record["reference"],
            label=record.get("label") or NO_LABEL,  # frozen evaluation rows may be of schema 1
            label_weight=record["label_weight"],
            source=record["source"],
            category=record["category"],
            partition=record["partition"],
        )


def prompt_id(prompt: Sequence[Message]) -> str:
    """sha256 of the prompt with Unicode composed (NFC), spaces run together and case folded."""
    return _digest([[turn["role"], normalised_text(turn["content"])] for turn in prompt])


def normalised_text(text: str) -> str:
    """NFC, one space between words, none at the ends, case folded: for identity, never for training."""
    return " ".join(unicodedata.normalize("NFC", text).split()).casefold()


def rows_of(table: pa.Table) -> Iterator[Row]:
    """Rows of a snapshot table, in order, a record batch at a time."""
    for batch in table.to_batches():
        for record in batch.to_pylist():
            yield Row.from_record(record)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()

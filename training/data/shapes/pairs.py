"""Shape (a): `prompt`, `chosen` and `rejected` as texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.schema.data import ColumnsConfig
from training.data.shapes import hh
from training.data.shapes.common import Parts, lookup, text, user_prompt

NAME = "pairs"


def required_columns(columns: ColumnsConfig) -> tuple[str, ...]:
    """Columns without which no row of this shape can be read."""
    return (columns.prompt or "prompt", columns.chosen or "chosen", columns.rejected or "rejected")


def matches(raw: Mapping[str, Any], columns: ColumnsConfig) -> bool:
    """Whether a row looks like this shape: three texts."""
    return all(isinstance(lookup(raw, path), str) for path in required_columns(columns))


def read(raw: Mapping[str, Any], columns: ColumnsConfig) -> Parts:
    """Prompt and both sides. A prompt that is itself a transcript up to `Assistant:` becomes its turns."""
    prompt, chosen, rejected = (text(raw, path) for path in required_columns(columns))
    if prompt.rstrip().endswith(hh.ASSISTANT):
        return Parts(hh.turns(prompt.rstrip().removesuffix(hh.ASSISTANT)), chosen, rejected)
    return Parts(user_prompt(prompt), chosen, rejected)

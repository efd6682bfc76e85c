"""Shape (d): trajectories, several stored answers to one prompt, with or without a reference and rewards."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from configs.schema.data import ColumnsConfig, ResponseColumn
from training.data.reasons import Problem, Reason
from training.data.schema import Message, StoredResponse
from training.data.shapes.common import Parts, lookup, messages, required, user_prompt

NAME = "responses"
LIST_COLUMN = "responses"


def required_columns(columns: ColumnsConfig) -> tuple[str, ...]:
    """Columns without which no row of this shape can be read."""
    answers = tuple(column.text for column in columns.responses) or (LIST_COLUMN,)
    return (columns.prompt or "prompt", *answers)


def matches(raw: Mapping[str, Any], columns: ColumnsConfig) -> bool:
    """Whether a row looks like this shape: answers named in the config, or a list of them."""
    return bool(columns.responses) or isinstance(lookup(raw, LIST_COLUMN), list)


def read(raw: Mapping[str, Any], columns: ColumnsConfig) -> Parts:
    """Prompt and stored answers. Answers that are missing or empty are left out; a row without any is a Problem."""
    prompt = _prompt(required(raw, columns.prompt or "prompt"), columns.prompt or "prompt")
    if columns.responses:
        found = [_named(raw, column) for column in columns.responses]
    else:
        found = [_listed(item) for item in _list(raw)]
    responses = tuple(item for item in found if item is not None)
    if not responses:
        raise Problem(Reason.EMPTY_ANSWER, "no stored answer has any text")
    return Parts(prompt, responses=responses)


def _prompt(value: Any, path: str) -> tuple[Message, ...]:
    return user_prompt(value) if isinstance(value, str) else messages(value, path)


def _list(raw: Mapping[str, Any]) -> list[Any]:
    value = required(raw, LIST_COLUMN)
    if not isinstance(value, list):
        raise Problem(Reason.WRONG_TYPE, f"column {LIST_COLUMN} holds {type(value).__name__}, not a list of answers")
    return value


def _named(raw: Mapping[str, Any], column: ResponseColumn) -> StoredResponse | None:
    reward = None if column.reward is None else lookup(raw, column.reward)
    return _response(lookup(raw, column.text), column.writer, reward, column.text)


def _listed(item: Any) -> StoredResponse | None:
    if isinstance(item, Mapping):
        return _response(item.get("text"), item.get("source") or "stored", item.get("reward"), LIST_COLUMN)
    return _response(item, "stored", None, LIST_COLUMN)


def _response(text: Any, source: Any, reward: Any, path: str) -> StoredResponse | None:
    if text is None or (isinstance(text, str) and not text.strip()):
        return None
    if not isinstance(text, str) or not isinstance(source, str):
        raise Problem(Reason.WRONG_TYPE, f"column {path}: an answer that is {type(text).__name__}, not text")
    return StoredResponse(text=text, source=source, reward=_reward(reward, path))


def _reward(value: Any, path: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise Problem(Reason.BAD_REWARD, f"column {path}")
    # float32, as it will be stored: the row's id must be the same after reading it back.
    return float(np.float32(value))

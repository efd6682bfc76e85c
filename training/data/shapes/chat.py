"""Shape (b): chat messages in the prompt, in the two sides, or in both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.schema.data import ColumnsConfig
from training.data.reasons import Problem, Reason
from training.data.schema import Message
from training.data.shapes.common import Parts, lookup, messages, required, user_prompt

NAME = "chat"


def required_columns(columns: ColumnsConfig) -> tuple[str, ...]:
    """Columns without which no row of this shape can be read; the prompt may be the sides' shared beginning."""
    paths = (columns.chosen or "chosen", columns.rejected or "rejected")
    return paths if columns.prompt is None else (columns.prompt, *paths)


def matches(raw: Mapping[str, Any], columns: ColumnsConfig) -> bool:
    """Whether a row looks like this shape: two sides, and a list of messages somewhere."""
    sides = [lookup(raw, columns.chosen or "chosen"), lookup(raw, columns.rejected or "rejected")]
    prompt = lookup(raw, columns.prompt or "prompt")
    return None not in sides and any(isinstance(value, list) for value in (prompt, *sides))


def read(raw: Mapping[str, Any], columns: ColumnsConfig) -> Parts:
    """Prompt and both sides.

    A side is a text, one assistant message, or the whole chat. Without a prompt column the prompt is what the two
    chats share; a prompt given beside whole chats must agree with their beginning (a system turn before it is kept).
    """
    chosen_path, rejected_path = columns.chosen or "chosen", columns.rejected or "rejected"
    given = _prompt(lookup(raw, columns.prompt or "prompt"), columns.prompt or "prompt")
    chosen = _side(required(raw, chosen_path), chosen_path)
    rejected = _side(required(raw, rejected_path), rejected_path)
    if chosen[:-1] != rejected[:-1]:
        raise Problem(Reason.PROMPTS_DIFFER, f"{chosen_path} and {rejected_path} part before the last answer")
    prompt = _joined(given, chosen[:-1], f"{columns.prompt or 'prompt'} is not the beginning of {chosen_path}")
    return Parts(prompt, chosen[-1]["content"], rejected[-1]["content"])


def _joined(given: tuple[Message, ...], shared: tuple[Message, ...], mismatch: str) -> tuple[Message, ...]:
    """One prompt from the prompt column and from what both chats share; the longer one where they agree."""
    if not given and not shared:
        raise Problem(Reason.EMPTY_PROMPT, "no prompt column, and the two chats share no turn")
    short, long = sorted((given, shared), key=len)
    if short in (long[: len(short)], long[len(long) - len(short) :]):
        return long
    raise Problem(Reason.PROMPTS_DIFFER, mismatch)


def _prompt(value: Any, path: str) -> tuple[Message, ...]:
    if value is None:
        return ()
    return user_prompt(value) if isinstance(value, str) else messages(value, path)


def _side(value: Any, path: str) -> tuple[Message, ...]:
    """The side's turns; the last one is the answer."""
    turns = (Message(role="assistant", content=value),) if isinstance(value, str) else messages(value, path)
    if not turns or turns[-1]["role"] != "assistant":
        raise Problem(Reason.NO_ASSISTANT_TURN, f"column {path}")
    return turns

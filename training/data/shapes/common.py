"""What every shape needs: reading a value by its path, and turning it into text or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.data.reasons import Problem, Reason
from training.data.schema import Message, StoredResponse

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True)
class Parts:
    """What a shape finds in a raw row: the prompt, and a pair or several stored answers."""

    prompt: tuple[Message, ...]
    chosen: str | None = None
    rejected: str | None = None
    responses: tuple[StoredResponse, ...] | None = None


def lookup(raw: Mapping[str, Any], path: str) -> Any:
    """The value at `path`: a column of that very name, else a dotted path; None where there is none."""
    if path in raw:
        return raw[path]
    value: Any = raw
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def required(raw: Mapping[str, Any], path: str) -> Any:
    """`lookup`, but a missing value is a Problem."""
    value = lookup(raw, path)
    if value is None:
        raise Problem(Reason.MISSING_VALUE, f"column {path}")
    return value


def text(raw: Mapping[str, Any], path: str) -> str:
    """The text at `path`."""
    value = required(raw, path)
    if not isinstance(value, str):
        raise Problem(Reason.WRONG_TYPE, f"column {path} holds {type(value).__name__}, not text")
    return value


def user_prompt(question: str) -> tuple[Message, ...]:
    """A one-turn prompt."""
    return (Message(role="user", content=question),)


def messages(value: Any, path: str) -> tuple[Message, ...]:
    """Chat messages from a list of {role, content} (or {from, value}) records."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise Problem(Reason.WRONG_TYPE, f"column {path} holds {type(value).__name__}, not a list of messages")
    return tuple(_message(turn, path) for turn in value)


def _message(turn: Any, path: str) -> Message:
    if not isinstance(turn, Mapping):
        raise Problem(Reason.WRONG_TYPE, f"column {path}: a message is {type(turn).__name__}, not {{role, content}}")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role.casefold() not in _ROLES:
        # The role itself is not repeated: in a shifted file it may be user text.
        raise Problem(Reason.UNKNOWN_ROLE, f"column {path}")
    return Message(role=_ROLES[role.casefold()], content=_content(turn.get("content", turn.get("value")), path))


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise Problem(Reason.MISSING_VALUE, f"column {path}: a message without content")
    if isinstance(value, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise Problem(Reason.WRONG_TYPE, f"column {path}: a message whose content is not text")

"""Shape (c): two whole HH transcripts; the prompt is all up to and including the last `Assistant:` marker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from configs.schema.data import ColumnsConfig
from training.data.reasons import Problem, Reason
from training.data.schema import Message
from training.data.shapes.common import Parts, lookup, text

NAME = "hh"
HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
_MARKER = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def required_columns(columns: ColumnsConfig) -> tuple[str, ...]:
    """Columns without which no row of this shape can be read."""
    return (columns.chosen or "chosen", columns.rejected or "rejected")


def matches(raw: Mapping[str, Any], columns: ColumnsConfig) -> bool:
    """Whether a row looks like this shape: two texts with the marker, and no prompt beside them."""
    sides = [lookup(raw, path) for path in required_columns(columns)]
    alone = lookup(raw, columns.prompt or "prompt") is None
    return alone and all(isinstance(side, str) for side in sides) and any(ASSISTANT in side for side in sides)


def read(raw: Mapping[str, Any], columns: ColumnsConfig) -> Parts:
    """Prompt turns and both last answers."""
    chosen_path, rejected_path = required_columns(columns)
    prompt, chosen = _split(text(raw, chosen_path), chosen_path)
    other_prompt, rejected = _split(text(raw, rejected_path), rejected_path)
    if prompt != other_prompt:
        raise Problem(Reason.PROMPTS_DIFFER, "the transcripts part before the last assistant turn")
    return Parts(turns(prompt), chosen, rejected)


def turns(transcript: str) -> tuple[Message, ...]:
    """The turns of a transcript whose last answer has been cut off. Raises Problem where it is malformed."""
    pieces = _MARKER.split("\n\n" + transcript.lstrip())
    if pieces[0].strip():
        raise Problem(Reason.NO_QUESTION, "text before the first turn")
    return tuple(
        Message(role=_ROLES[speaker], content=said.strip())
        for speaker, said in zip(pieces[1::2], pieces[2::2], strict=True)
    )


def _split(transcript: str, path: str) -> tuple[str, str]:
    prompt, marker, answer = transcript.rpartition(ASSISTANT)
    if not marker:
        raise Problem(Reason.NO_ASSISTANT_TURN, f"column {path}")
    if HUMAN in answer:
        raise Problem(Reason.RUNS_INTO_NEXT_TURN, f"column {path}")
    return prompt, answer.strip()

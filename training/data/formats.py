"""From a raw record of any known shape to a Row, and finding out which shape a data set has."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from configs.schema.data import ColumnsConfig, DataConfig
from training.data.reasons import Problem, Reason
from training.data.schema import CHOSEN, NO_LABEL, REJECTED, Row
from training.data.shapes import chat, hh, pairs, responses
from training.data.shapes.common import Parts, lookup
from training.errors import DataError


class Shape(Protocol):
    """What a module of training/data/shapes offers. To add a format: write such a module and list it in SHAPES."""

    NAME: str

    def required_columns(self, columns: ColumnsConfig) -> tuple[str, ...]:
        """Columns that must be there."""

    def matches(self, raw: Mapping[str, Any], columns: ColumnsConfig) -> bool:
        """Whether a record looks like this shape."""

    def read(self, raw: Mapping[str, Any], columns: ColumnsConfig) -> Parts:
        """Prompt and answers; raises Problem."""


# The order matters for `auto`: answers named in the config first, plain texts before anything implicit.
SHAPES: dict[str, Shape] = {shape.NAME: shape for shape in (responses, pairs, chat, hh)}

_OPTIONAL = ("reference", "source", "category", "label", "label_weight")


def choose_shape(config: DataConfig, sample: Sequence[Mapping[str, Any]], place: str) -> Shape:
    """The shape of the records in `sample` (the first readable ones), by config or by their columns.

    Raises DataError that names the columns found and says what to write.
    """
    found = sorted({name for raw in sample for name in raw})
    shape = _by_config(config, sample, found, place)
    needed = list(shape.required_columns(config.columns))
    needed += [path for name in _OPTIONAL if (path := getattr(config.columns, name)) is not None]
    missing = [path for path in needed if all(lookup(raw, path) is None for raw in sample)]
    # A stored answer may be missing anywhere; only the lack of every one is a wrong column.
    answers = [column.text for column in config.columns.responses]
    if answers and not set(answers) <= set(missing):
        missing = [path for path in missing if path not in answers]
    if missing:
        raise DataError(
            f"{place}: no column {', '.join(repr(path) for path in missing)}, which format `{shape.NAME}` needs; "
            f"columns found: {', '.join(found)}",
            _advice(shape),
        )
    return shape


def _by_config(config: DataConfig, sample: Sequence[Mapping[str, Any]], found: list[str], place: str) -> Shape:
    if config.format != "auto":
        return SHAPES[config.format]
    for shape in SHAPES.values():
        if any(shape.matches(raw, config.columns) for raw in sample):
            return shape
    hint = _why_not(config, sample, found)
    raise DataError(
        f"{place}: none of the known shapes fits the columns found: {', '.join(found)}{hint}",
        "name your columns, e.g. data.columns: {prompt: question, chosen: better, rejected: worse}; "
        "for stored answers data.columns: {prompt: question, responses: [answer_a, answer_b]}",
    )


def _why_not(config: DataConfig, sample: Sequence[Mapping[str, Any]], found: list[str]) -> str:
    """What a person can see at once: a name in the config that no column has, a column without a single value."""
    asked = {name: getattr(config.columns, name) for name in ("prompt", "chosen", "rejected")}
    absent = [f"data.columns.{k} names `{v}`" for k, v in asked.items() if v and v.split(".")[0] not in found]
    empty = [name for name in found if all(raw.get(name) is None for raw in sample)]
    told = [*absent, *([f"empty in all rows looked at: {', '.join(empty)}"] if empty else [])]
    return f" ({'; '.join(told)})" if told else ""


def _advice(shape: Shape) -> str:
    if shape.NAME == responses.NAME:
        return "write data.columns: {prompt: YOUR_COLUMN, responses: [PATH, ...]}, dotted paths for nested columns"
    return "write data.columns: {prompt: YOUR_COLUMN, chosen: YOUR_COLUMN, rejected: YOUR_COLUMN}, or a data.format"


def normalise(raw: Mapping[str, Any], shape: Shape, config: DataConfig, partition: str, default_source: str) -> Row:
    """One record as a Row. Raises Problem; what the texts say is checked elsewhere (checks.py)."""
    parts = shape.read(raw, config.columns)
    label, chosen, rejected = _labelled(raw, config, parts)
    return Row(
        prompt=parts.prompt,
        chosen=chosen,
        rejected=rejected,
        responses=parts.responses,
        reference=_word(raw, config.columns.reference, "reference"),
        label=label,
        label_weight=_weight(lookup(raw, config.columns.label_weight or "label_weight")),
        source=_word(raw, config.columns.source, "source") or default_source,
        category=_word(raw, config.columns.category, "category") or "none",
        partition=partition,
    )


def _labelled(raw: Mapping[str, Any], config: DataConfig, parts: Parts) -> tuple[str, str | None, str | None]:
    """The label, and the sides, better one first.

    Only a column named in the config is a label: many sets have an unrelated one.
    """
    if config.columns.label is None or parts.chosen is None:
        return NO_LABEL, parts.chosen, parts.rejected
    label = _plain(lookup(raw, config.columns.label)).strip().casefold()
    if label in {value.casefold() for value in config.chosen_labels}:
        return CHOSEN, parts.chosen, parts.rejected
    if label in {value.casefold() for value in config.rejected_labels}:
        return REJECTED, parts.rejected, parts.chosen
    raise Problem(Reason.UNKNOWN_LABEL, f"column {config.columns.label}")


def _word(raw: Mapping[str, Any], named: str | None, usual: str) -> str | None:
    """A text or number as text. A column nobody named, of another type, is a coincidence of names and left alone."""
    value = lookup(raw, named or usual)
    if isinstance(value, str):
        return value or None
    if isinstance(value, numbers.Real):
        return _plain(value)
    if value is None or named is None:
        return None
    raise Problem(Reason.WRONG_TYPE, f"column {named} holds {type(value).__name__}, not text")


def _plain(value: Any) -> str:
    """1.0 and 1 are the same label, and so are True and true."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _weight(value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 < float(value) <= 1.0:
        raise Problem(Reason.BAD_LABEL_WEIGHT, "not in (0, 1]")
    return float(np.float32(value))

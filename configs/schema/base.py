"""The one shape every section shares: frozen, closed, documented; and the numbers that it is made of, each bounded.

The upper bounds are far beyond what any night needs. What exceeds them is a slip of the pen (a missing point, a zero
too many), and would otherwise be found out hours later by a full memory or a clock.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Section(BaseModel):
    """A section of the night's YAML. Frozen; an unknown key is an error, never ignored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, given: Any, info: ValidationInfo) -> Any:
        """`max: no` says "none" to a person, and would be 0; `relative: yes` would allow the loss of everything."""
        if not isinstance(given, bool):
            return given
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if bool not in kinds and kinds & {int, float}:
            raise ValueError("yes and no (true, false) are no numbers; write one, or null where it may be left out")
        return given


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that an annotation consists of."""
    inner = get_args(annotation)
    return set().union(*map(_kinds, inner)) if inner else {annotation}


def at_most(most: float, unit: str) -> AfterValidator:
    """An upper bound whose message tells the unit, e.g. `at_most(1_000, "decoder layers")`."""

    def check(number: float) -> float:
        if number > most:
            raise ValueError(f"more than any night needs; write at most {most:,} {unit}")
        return number

    return AfterValidator(check)


Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share between 0 and 1."""
LearningRate = Annotated[float, Field(gt=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0), at_most(1e9, "(a factor or an amount)")]
Positive = Annotated[float, Field(gt=0.0), at_most(1e9, "(a factor or an amount)")]
Seconds = Annotated[float, Field(gt=0.0), at_most(86_400.0, "seconds")]
Minutes = Annotated[float, Field(gt=0.0), at_most(43_200.0, "minutes")]

Rows = Annotated[int, Field(ge=1), at_most(1_000_000_000, "rows")]
BatchSize = Annotated[int, Field(ge=1), at_most(100_000, "rows side by side")]
Prompts = Annotated[int, Field(ge=1), at_most(10_000_000, "prompts")]
Characters = Annotated[int, Field(ge=1), at_most(100_000_000, "characters")]
Tokens = Annotated[int, Field(ge=1), at_most(10_000_000, "tokens")]
Steps = Annotated[int, Field(ge=1), at_most(10_000_000, "optimiser steps")]
Passes = Annotated[int, Field(ge=1), at_most(1_000, "passes over the data")]
Rounds = Annotated[int, Field(ge=1), at_most(10_000, "rounds")]
Layers = Annotated[int, Field(ge=1), at_most(1_000, "decoder layers")]
Rank = Annotated[int, Field(ge=0), at_most(8_192, "(the rank of an adapter)")]
Nights = Annotated[int, Field(ge=1), at_most(36_600, "nights")]
PositiveInt = Annotated[int, Field(ge=1), at_most(10_000, "(a count)")]
NonNegativeInt = Annotated[int, Field(ge=0), at_most(10_000, "(a count)")]

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path as a person writes it: a leading ~ becomes the home of whoever runs the night, once, when it is loaded."""

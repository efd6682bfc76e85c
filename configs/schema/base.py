"""The one shape every section shares: frozen, closed, documented."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A section of the night's YAML. Frozen; an unknown key is an error, never ignored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share between 0 and 1."""
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
LearningRate = Annotated[float, Field(gt=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path as a person writes it: a leading ~ becomes the home of whoever runs the night, once, when it is loaded."""

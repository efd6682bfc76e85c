"""Reading a record that another version of Nightjar wrote: keys that this version does not know are left out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Record = TypeVar("Record", bound=BaseModel)


def without_unknown_keys(kind: type[Record], content: Any) -> Record:
    """`content` as a `kind`, whatever keys a later version has added. Raises ValidationError for what else is wrong.

    A night's records outlive the code that wrote them; a config that a person writes is never read like this.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        locations = [item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"]
        try:
            known = _without(content, locations)
        except (LookupError, TypeError):  # a location that leads through a choice of types is none in the content
            raise error from None
        if not locations:
            raise
    return kind.model_validate(known)


def _without(content: Any, locations: Sequence[tuple[int | str, ...]]) -> Any:
    known = copy.deepcopy(content)
    for *path, key in locations:
        section = known
        for part in path:
            section = section[part]
        del section[key]
    return known

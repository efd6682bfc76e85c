"""The gsm8k reward: 1 where the number after the last answer marker is the reference's, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from training.data.schema import Message
from training.errors import DataError

MARKERS = ("####", "A:")
"""What may announce the final answer, as in the data set itself and in its published model solutions."""

_NUMBER = re.compile(r"\s*\$?\s*([-+−]?)\s*\$?\s*(\d[\d,]*(?:\.\d+)?|\.\d+)")
# Model answers carry float noise such as 8.333333333333334; references are whole numbers or short decimals.
TOLERANCE = Decimal("1e-6")


def gsm8k(
    prompt: Sequence[Message],
    response: str,
    reference: str | None = None,
    *,
    markers: Sequence[str] = MARKERS,
) -> float:
    """1.0 for the right final number, 0.0 for another one or none. The prompt is not looked at.

    Commas, a dollar sign, a sign and decimals are understood: `A: $1,234.50`. `reference` is a worked solution with a
    marker, or a bare number. Raises DataError where the reference holds no number.
    """
    if reference is None:
        raise DataError(
            "the gsm8k reward got a row without a reference", "name the column: data.columns: {reference: ...}"
        )
    right = final_number(reference, markers)
    if right is None:
        right = _number(reference, whole=True)
    if right is None:
        raise DataError(
            f"the gsm8k reward found no number after {' or '.join(markers)} in a reference",
            "write references as `... #### 18`, `... A: 18` or `18`",
        )
    said = final_number(response, markers)
    return 1.0 if said is not None and abs(said - right) <= TOLERANCE * max(Decimal(1), abs(right)) else 0.0


def final_number(text: str, markers: Sequence[str] = MARKERS) -> Decimal | None:
    """The number right after the last of any of the markers, None without marker or number."""
    places = [(text.rfind(marker), len(marker)) for marker in markers]
    place, length = max(places)
    return None if place < 0 else _number(text[place + length :])


def _number(text: str, whole: bool = False) -> Decimal | None:
    found = _NUMBER.match(text)
    if found is None or (whole and text[found.end() :].strip(" .%")):
        return None
    try:
        value = Decimal(found[2].replace(",", ""))
    except InvalidOperation:
        return None
    return value if found[1] in ("", "+") else -value

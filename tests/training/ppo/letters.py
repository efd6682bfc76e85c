"""A reward that never changes, for the golden curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def letters(prompt: Sequence[Mapping[str, str]], response: str, reference: str | None = None) -> float:
    """Two for each e, minus a tenth for each letter."""
    return 2.0 * response.count("e") - 0.1 * len(response)

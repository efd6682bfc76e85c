"""What a planted bug is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In `file`, `before` (found exactly once) becomes `after`; `check` names the oracle check that must fail."""

    what: str
    file: str
    before: str
    after: str
    check: str

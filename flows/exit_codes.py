"""How a command ends, for scripts; the README lists them."""

from __future__ import annotations

DONE, DEFECT, USER, REJECTED, BUSY = 0, 1, 2, 3, 4

"""What is only shown ends no night: a page, an artifact, a line on a terminal, the tidying up after an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def only_shown(what: str) -> Iterator[None]:
    """Go on behind the block whatever happened in it, short of an interrupt; the log says what is missing."""
    try:
        yield
    except Exception as error:
        log.warning("%s is missing (%s: %s)", what, type(error).__name__, error)

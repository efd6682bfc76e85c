"""Do the servers' clocks agree with ours? Schedules, staleness of nights and signs of life are judged by both."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException

from configs.credentials import user_and_password

TOLERATED_SECONDS = 60.0
_TIMEOUT_SECONDS = 10.0


def clocks_apart(servers: Iterable[tuple[str, str]]) -> list[str]:
    """A sentence for each (name, health URL) whose clock differs by over a minute. Silent ones tell nothing here."""
    return [
        f"{name}'s clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
        for name, url in servers
        if (seconds := _seconds_ahead(url)) is not None and abs(seconds) > TOLERATED_SECONDS
    ]


def _seconds_ahead(url: str) -> float | None:
    """By the Date that every answer carries (HTTP: RFC 9110, 6.6.1), a refusal as well; whole seconds."""
    plain, _ = user_and_password(url)  # the clock is told to everyone
    try:
        with urllib.request.urlopen(plain, timeout=_TIMEOUT_SECONDS) as reply:
            told = reply.headers.get("Date")
    except urllib.error.HTTPError as refusal:
        told = refusal.headers.get("Date")
    except (OSError, ValueError, HTTPException):
        return None
    if told is None:
        return None
    return (parsedate_to_datetime(told) - datetime.now(UTC)).total_seconds()

"""A Prefect server that goes away during a command: the night goes on, and its own record tells how it ended."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from configs.errors import NightjarError
from flows.exit_codes import DONE, REJECTED
from tasks.night_state import NightBook, NightState


class ServerGone(NightjarError):
    """Prefect could not be told the end of a run that had begun."""


def is_server_gone(error: Exception) -> bool:
    """Whether `error` is what Prefect raises when its server does not answer."""
    import httpx
    from prefect.exceptions import PrefectHTTPStatusError

    return isinstance(error, (httpx.TransportError, PrefectHTTPStatusError))


def told_by_record(home: Path, chain: str, since: float, gone: ServerGone) -> int:
    """Tell the night that has ended after `since` (seconds since 1970) from its record; the command's exit code.

    Raises NightjarError when none has, or it failed.
    """
    night = _ended(home, chain, since)
    if night is None:
        raise gone
    if night.status == "failed":
        raise NightjarError(f"{night.sentence}; {gone.message}", "repeat the command; it goes on where it stopped")
    outcome = f", version {night.version} is champion" if night.promoted else ""
    words = f"{night.sentence}{outcome}; {gone.message}, so its pages end earlier"
    Console(stderr=True).print(escape(words), highlight=False, soft_wrap=True)
    return DONE if night.promoted or night.status == "skipped" else REJECTED


def _ended(home: Path, chain: str, since: float) -> NightState | None:
    nights = [night for night in NightBook(home).nights(chain) if night.ended is not None and night.ended >= since]
    return nights[-1] if nights else None

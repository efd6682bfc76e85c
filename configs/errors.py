"""The root of Nightjar's one family of errors."""

from __future__ import annotations


class NightjarError(Exception):
    """Anything Nightjar refuses or fails at, said in words for the person who can mend it.

    `message` names the file, row, key or rule; `hint` says the way out.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  what to do: {self.hint}"


class ConfigError(NightjarError, ValueError):
    """The night's YAML is wrong; nothing has run yet. Raised before any compute."""

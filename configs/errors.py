"""The root of Nightjar's one family of errors."""

from __future__ import annotations

from configs.credentials import without_passwords


class NightjarError(Exception):
    """Anything Nightjar refuses or fails at, said in words for the person who can mend it.

    `message` names the file, row, key or rule; `hint` says the way out. Many messages quote a library, which may have
    quoted an address: a password in one gets no further.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = without_passwords(message)
        self.hint = without_passwords(hint) if hint is not None else None
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  what to do: {self.hint}"


class ConfigError(NightjarError, ValueError):
    """The night's YAML is wrong; nothing has run yet. Raised before any compute."""

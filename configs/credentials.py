"""Passwords inside URIs: found before they are stored, and replaced where a URI is shown."""

from __future__ import annotations

import re

# A key with a slash in it ends the host for a URI parser, so this looks for the sign itself; `host:9000/` is a port.
_PASSWORD = re.compile(r"://[^/:@\s]*:(?!\d*(?:/|$))[^@\s]*@")
_USER_INFO = re.compile(r"://[^/\s@]*@")


def holds_password(uri: str) -> bool:
    """Whether `scheme://user:password@...` stands in it; a mere user (`abfs://container@account`) is none."""
    return _PASSWORD.search(uri) is not None


def without_credentials(text: str) -> str:
    """A URI, or a message with URIs in it, as it may be shown: user and password replaced."""
    return _USER_INFO.sub("://***@", _PASSWORD.sub("://***@", text))

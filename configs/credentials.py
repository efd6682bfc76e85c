"""Passwords inside URIs: found before they are stored, and replaced where a URI is shown."""

from __future__ import annotations

import re
from urllib.parse import unquote

# A key with a slash in it ends the host for a URI parser, so this looks for the sign itself; `host:9000/` is a port.
_PASSWORD = re.compile(r"://[^/:@\s]*:(?!\d*(?:/|$))[^@\s]*@")
_USER_INFO = re.compile(r"://[^/\s@]*@")
_IN_QUERY = re.compile(r"([?&](?:password|passwd|pwd|secret|token|sig|(?:x-amz-)?signature)=)[^&\s]+", re.IGNORECASE)


def holds_password(uri: str) -> bool:
    """Whether `scheme://user:password@...` or `?password=...` stands in it.

    A mere user (`abfs://container@account`) is none. Signatures and tokens of signed links count as passwords.
    """
    return _PASSWORD.search(uri) is not None or _IN_QUERY.search(uri) is not None


def without_credentials(text: str) -> str:
    """A URI, or a message with URIs in it, as it may be shown: user and password replaced."""
    return _USER_INFO.sub("://***@", without_passwords(text))


def without_passwords(text: str) -> str:
    """A message with URIs in it, without any password and whose it is. A mere user stays: it may be a container."""
    return _IN_QUERY.sub(r"\1***", _PASSWORD.sub("://***@", text))


def user_and_password(uri: str) -> tuple[str, tuple[str, str] | None]:
    """An http address without its log-in, and the log-in, decoded; other URIs, and those without one, as they are."""
    scheme, _, rest = uri.partition("://")
    place, slash, path = rest.partition("/")
    login, at, host = place.rpartition("@")
    user, colon, password = login.partition(":")
    if scheme not in ("http", "https") or not (at and colon):
        return uri, None
    return f"{scheme}://{host}{slash}{path}", (unquote(user), unquote(password))

"""Names as keys that every MLflow store takes. Different names have different keys, and most stay as they are."""

from __future__ import annotations

import hashlib
import re

_LENGTH = 200
_WORDS = {">": "gt", "<": "lt", "=": "eq", "+": "plus", "-": "dash"}
_TAKEN = re.compile(r"[A-Za-z0-9_.\-/ ]*")
_WORD = re.compile(r"-(?:gt|lt|eq|plus|dash|u[0-9a-f]+)-")


def mlflow_key(name: str) -> str:
    """Example: "kl_ref > 0.3" -> "kl_ref -gt- 0.3".

    What MLflow refuses becomes a word between dashes, and then (as where a name holds such a word of its own) so does a
    dash: the key can be read back. A longer one than 200 characters ends in a digest of the name.
    """
    key = name
    if not _TAKEN.fullmatch(name) or _WORD.search(name):
        key = re.sub(r"[^A-Za-z0-9_./ ]", _word, name)
    if len(key) <= _LENGTH:
        return key
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{key[: _LENGTH - 17]}-{digest}"


def _word(found: re.Match[str]) -> str:
    return f"-{_WORDS.get(found[0], f'u{ord(found[0]):x}')}-"

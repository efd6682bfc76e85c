"""The seeds of a night: other draws every night, the same ones whenever this night is continued."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def night_seed(root: int, index: int) -> int:
    """The seed of night `index` (from 1) of a chain with the config's seed `root`; in [0, 2**31).

    The first night draws from the config's seed itself, so that it can be repeated from the config alone.
    """
    if index == 1:
        return root
    return int.from_bytes(hashlib.sha256(f"{root}/night={index}".encode()).digest()[:4], "big") >> 1


def first_night_with(fingerprint: str, earlier: Iterable[tuple[int, str]], index: int) -> int:
    """The first night that had this data, out of the (index, fingerprint) of earlier ones; else `index`.

    What is trained on the data alone draws by that night: data that comes again finds the finished stages again.
    """
    return min((number for number, had in earlier if had == fingerprint), default=index)

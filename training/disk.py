"""A full disk, said in words: which file, what to free, and that repeating the command goes on. Torch-free."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import DiskFullError, NightjarError

# EFBIG is what a limit on the size of files (ulimit -f) says.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Libraries in Rust and C++ (safetensors, torch, SQLite) raise their own errors with the system's words in them.
_WORDS = tuple(os.strerror(number) for number in sorted(_FULL)) + ("database or disk is full",)


def is_disk_full(error: BaseException) -> bool:
    """Whether the system refused to write for want of room, whatever library says so."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(words in str(error) for words in _WORDS)


@contextmanager
def full_disk_in_words(folder: Path) -> Iterator[None]:
    """Turn a write that the disk under `folder` refused into DiskFullError; what is said in words already stays."""
    try:
        yield
    except NightjarError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        file = getattr(error, "filename", None) or folder
        cause = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DiskFullError(
            f"{file} could not be written: {cause}",
            f"free space (or raise the quota) on the disk of {folder}; repeating the command goes on, and old nights "
            "below runs/ in the home are the largest part of it",
        ) from error

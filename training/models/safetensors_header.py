"""Is a safetensors file whole? Asked of its header and its size alone, without torch and without reading weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from training.errors import ModelFolderError

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name to its shape."""

_LFS_POINTER = b"version https://git-lfs"
_AGAIN = "copy or download the file again; a copy that broke off is the usual cause"


def read_shapes(file: Path, role: str) -> Shapes:
    """The tensors of a file, whose header is sound and whose size is the one that the header asks for.

    Raises ModelFolderError naming role and file.
    """
    refuse_stand_in(file, role)
    try:
        with safe_open(str(file), framework="numpy") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ModelFolderError(
            f"{role}: {file}: damaged or cut off ({file.stat().st_size:,} bytes): {error}", _AGAIN
        ) from None


def refuse_stand_in(file: Path, role: str) -> None:
    """Raise ModelFolderError when the file is empty, or git-LFS has left a pointer in its place."""
    size = file.stat().st_size
    if size == 0:
        raise ModelFolderError(f"{role}: {file}: empty (0 bytes)", _AGAIN)
    with file.open("rb") as stream:
        begins = stream.read(len(_LFS_POINTER))
    if begins == _LFS_POINTER:
        raise ModelFolderError(
            f"{role}: {file}: a git-LFS pointer of {size} bytes, not the file itself",
            f"fetch what it points to: git -C {file.parent} lfs pull",
        )

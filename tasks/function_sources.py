"""What a user's own reward function is made of: a changed function makes a new result, never reuses an old one."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from training.errors import ConfigError


def source_digest(function: str | None) -> str | None:
    """sha256 of the source of `package.module:function`: the module's file, or every .py of it where it is a package.

    None without a function and for a built-in one, whose source is part of the code version. What the module imports
    from elsewhere is not covered. The module is found, not imported (its parent packages are). Raises ConfigError.
    """
    if function is None or ":" not in function:
        return None
    module = function.partition(":")[0]
    digest = hashlib.sha256()
    for file in _files(module, function):
        digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _files(module: str, function: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.has_location or spec.origin is None:
        raise ConfigError(
            f"reward function {function!r}: the source of {module} is not found",
            "the module must be a file that is installed, or lies on PYTHONPATH, where the nights run",
        )
    if spec.submodule_search_locations is None:
        return [Path(spec.origin)]
    return sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.py"))

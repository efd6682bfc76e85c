"""Rewards that are functions: the built-in ones by name, a user's own by an import path from an allow-list."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Sequence

from training.data.schema import Message
from training.errors import ConfigError
from training.rewards.gsm8k import gsm8k
from training.rewards.quickstart import quickstart

RewardFunction = Callable[[Sequence[Message], str, str | None], float]
"""(prompt messages, response text, reference or None) -> reward. Pure: the same texts always give the same number."""

BUILT_IN: dict[str, RewardFunction] = {"gsm8k": gsm8k, "quickstart": quickstart}

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def resolve_reward_function(name: str, allowed_imports: Sequence[str] = ()) -> RewardFunction:
    """The function called `name`: a built-in one, or `package.module:function` that stands in `allowed_imports`.

    Nothing outside the list is ever imported. Raises ConfigError saying what to write.
    """
    check_reward_name(name, allowed_imports)
    return BUILT_IN[name] if name in BUILT_IN else _import(name)


def check_reward_name(name: str, allowed_imports: Sequence[str], key: str = "reward.function") -> None:
    """Whether `name` may be used, without importing anything. Raises ConfigError naming the config's `key`."""
    if name in BUILT_IN:
        return
    if not _IMPORT_PATH.fullmatch(name):
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        guess = f"; did you mean `{close[0]}`?" if close else ""
        raise ConfigError(
            f"{key} {name!r} is neither built in ({', '.join(sorted(BUILT_IN))}) nor an import path{guess}",
            "write one of those names, or package.module:function",
        )
    if name not in allowed_imports:
        raise ConfigError(
            f"{key} {name!r} is not in reward.allowed_functions, so it is not imported",
            f"if you trust that code, write reward.allowed_functions: [{name!r}]",
        )


def _import(path: str) -> RewardFunction:
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may fail in any way while it is imported
        raise ConfigError(
            f"reward.function {path!r}: {module_name} cannot be imported: {type(error).__name__}: {error}",
            "the module must be installed, or lie on PYTHONPATH, where the stages run",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"reward.function {path!r}: {module_name} has no function {function_name}",
            "write package.module:function with a function (prompt, response, reference) -> float",
        )
    return function  # type: ignore[no-any-return]

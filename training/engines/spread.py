"""What a model is whose weights lie in parts on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

Read = TypeVar("Read")


class Spread(Protocol):
    """A model whose weights are spread over ranks: reading it is a collective act, save inside `whole()`."""

    def read(self, read: Callable[[], Read]) -> Read:
        """Run a forward pass of any kind."""

    def whole(self) -> AbstractContextManager[None]:
        """Every weight whole on every rank, for passes without gradients."""

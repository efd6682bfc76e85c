"""What a model is whose weights lie in parts on several ranks, and the way into it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from torch import nn

Read = TypeVar("Read")


class Spread(Protocol):
    """A model whose weights are spread over ranks: reading it is a collective act, save inside `whole()`."""

    def read(self, read: Callable[[], Read]) -> Read:
        """Run a forward pass of any kind."""

    def whole(self) -> AbstractContextManager[None]:
        """Every weight whole on every rank, for passes without gradients."""


class Doorway(nn.Module):
    """The one way into a spread model: whatever is read of it, its own hooks run before and after."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, read: Callable[[], Read]) -> Read:
        """Read while the weights outside the layers are whole."""
        return read()

"""A metric that knows how to be added to itself: sum and count, reduced once, at the edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from training.world import World


@dataclass(frozen=True)
class Mean:
    """A mean in the making. Adding over microbatches and ranks is exact."""

    total: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """total / count; 0 where nothing was counted."""
        return self.total / self.count if self.count else 0.0


class MeanTable:
    """Named means of one step."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}

    def add(self, values: Mapping[str, Mean]) -> None:
        """Add one microbatch's."""
        for name, mean in values.items():
            self._means[name] = self._means.get(name, Mean(0.0, 0.0)) + mean

    def reduce(self, world: World) -> dict[str, float]:
        """Values over all ranks; a rank that had no rows holds no names and adds nothing."""
        names = sorted({name for own in world.gather(sorted(self._means)) for name in own})
        means = [self._means.get(name, Mean(0.0, 0.0)) for name in names]
        sums = torch.tensor([[mean.total, mean.count] for mean in means], dtype=torch.float64)
        if names:
            world.sum_(sums)
        return {name: Mean(*pair).value for name, pair in zip(names, sums.tolist(), strict=True)}

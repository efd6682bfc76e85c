"""Prioritised sampling of trajectories. numpy only.

Source: Schaul et al., Prioritized Experience Replay, arXiv 1511.05952: proportional variant, eq. 1 and section 3.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from training.errors import CheckpointError

FREE = -1
"""`order` of a slot that holds nothing."""

_SETTINGS = ("capacity", "alpha", "beta_start", "beta_end", "beta_steps", "eps")


class PrioritizedSampler:
    """Draws slots 0..capacity-1 in proportion to priority ** alpha, and the weights that undo the bias.

    P(i) = p_i^alpha / sum_k p_k^alpha, drawn independently with replacement; w_i = (N P(i))^-beta / max over the batch,
    N being the slots in use; p_i = |TD error| + eps. Beta goes linearly from `beta_start` at the first `sample` to
    `beta_end` at the one after `beta_steps` of them, and stays there.

    Sampling costs one cumulative sum over the slots, redone only after a change, and a binary search for each draw: at
    50,000 slots cheaper in numpy than walking a sum tree, and free of a tree's drift.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        beta_start: float = 0.4,
        beta_end: float = 1.0,
        beta_steps: int,
        eps: float,
        seed: int,
    ) -> None:
        if capacity < 1 or beta_steps < 1:
            raise ValueError(f"capacity {capacity} and beta_steps {beta_steps} must be at least 1")
        if not (alpha >= 0 and eps > 0 and beta_start >= 0 and beta_end >= 0):
            raise ValueError(f"alpha {alpha}, beta {beta_start}..{beta_end} must be >= 0, and eps {eps} above 0")
        self.capacity = int(capacity)
        self.alpha = float(alpha)
        self.beta_start = float(beta_start)
        self.beta_end = float(beta_end)
        self.beta_steps = int(beta_steps)
        self.eps = float(eps)
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self.reset()

    def reset(self) -> None:
        """Forget every slot and start beta again; the generator goes on where it is."""
        self._priority = np.zeros(self.capacity, dtype=np.float64)
        self._order = np.full(self.capacity, FREE, dtype=np.int64)
        self._next_order = 0
        self._samples = 0
        self._mass = np.zeros(self.capacity, dtype=np.float64)
        self._cumulative: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        """Slots in use: N."""
        return int(np.count_nonzero(self._order != FREE))

    @property
    def beta(self) -> float:
        """Exponent of the weights of the next `sample`."""
        progress = min(1.0, self._samples / self.beta_steps)
        return self.beta_start + (self.beta_end - self.beta_start) * progress

    def add(self, n: int) -> NDArray[np.int64]:
        """Take n slots and return them [n]: free ones in ascending order, then those added longest ago, overwritten.

        New slots get the highest priority in use (1 when there is none), so that each is soon drawn once.
        Raises ValueError when n exceeds the capacity.
        """
        if not 0 <= n <= self.capacity:
            raise ValueError(f"cannot add {n} trajectories to a sampler of capacity {self.capacity}")
        highest = float(self._priority.max()) if len(self) else 1.0
        indices = self._next_slots(n)
        self._order[indices] = self._next_order + np.arange(n)
        self._next_order += n
        self._set(indices, np.full(n, highest))
        return indices

    def remove(self, indices: ArrayLike) -> None:
        """Free these slots: drawn no more, and handed out again by `add`. Raises ValueError for a free one."""
        slots = self._in_use(indices)
        self._order[slots] = FREE
        self._priority[slots] = 0.0
        self._mass[slots] = 0.0
        self._cumulative = None

    def sample(
        self, n: int, filter_weights: NDArray[np.floating[Any]] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Draw n slots: indices [n] int64, and weights [n] float32 with maximum 1.

        `filter_weights` [capacity], not negative, multiply the priorities' mass: P(i) is then proportional to
        f_i p_i^alpha. The weights undo the priorities and leave the filter, w_i = (N P(i) / f_i)^-beta with f scaled to
        mean 1 over the slots in use. Raises ValueError when nothing can be drawn.
        """
        if n < 1:
            raise ValueError(f"cannot draw {n} trajectories")
        cumulative = self._cumulative_mass(filter_weights)
        total = float(cumulative[-1])
        if not 0.0 < total < np.inf:
            raise ValueError("nothing to draw from: no trajectory was added, or the filter leaves none")
        # Below the total even where the product rounds up; side="right" then never lands on a slot without mass.
        points = np.minimum(self._generator.random(n) * total, np.nextafter(total, 0.0))
        indices = np.searchsorted(cumulative, points, side="right").astype(np.int64)
        relative = self._mass[indices] / total  # P(i) / f_i up to a factor that the maximum cancels
        beta = self.beta
        self._samples += 1
        # Only ratios within the batch matter, and scaling by the smallest keeps the power within (0, 1].
        weights = (relative / relative.min()) ** -beta
        return indices, weights.astype(np.float32)

    def update(self, indices: ArrayLike, td_errors: ArrayLike) -> None:
        """Set p = |TD error| + eps. Of a slot named twice the later value holds.

        Raises ValueError for a free slot or a TD error that is not finite.
        """
        slots = self._in_use(indices)
        errors = np.abs(np.asarray(td_errors, dtype=np.float64))
        if errors.shape != slots.shape:
            raise ValueError(f"{slots.size} indices but TD errors of shape {errors.shape}")
        if not np.isfinite(errors).all():
            raise ValueError(f"TD error of slot {slots[~np.isfinite(errors)][0]} is not finite")
        self._set(slots, errors + self.eps)

    def probabilities(self) -> NDArray[np.float64]:
        """P(i) of every slot [capacity]; 0 for free ones, and everywhere when all are free."""
        total = self._mass.sum()
        return self._mass / total if total > 0 else np.zeros(self.capacity)

    def priorities(self) -> NDArray[np.float64]:
        """p_i of every slot [capacity]; 0 for free ones."""
        return self._priority.copy()

    def state_dict(self) -> dict[str, Any]:
        """All that the next draw depends on: plain numbers, two arrays [capacity], the generator's state as JSON."""
        return {
            **{name: getattr(self, name) for name in _SETTINGS},
            "priority": self._priority.copy(),
            "order": self._order.copy(),
            "next_order": self._next_order,
            "samples": self._samples,
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; arrays may come back as lists.

        Raises CheckpointError, changing nothing, when the state is incomplete or of a sampler with other settings.
        """
        for name in _SETTINGS:
            if state.get(name) != getattr(self, name):
                found, own = state.get(name), getattr(self, name)
                raise CheckpointError(f"sampler state has {name} = {found!r}, this sampler {own!r}")
        try:
            priority = np.array(state["priority"], dtype=np.float64)
            order = np.array(state["order"], dtype=np.int64)
            next_order, samples = int(state["next_order"]), int(state["samples"])
            bit_generator = np.random.PCG64()
            bit_generator.state = state["generator"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"sampler state is incomplete or damaged: {error!r}") from None
        shape = (self.capacity,)
        if priority.shape != shape or order.shape != shape or not (np.isfinite(priority) & (priority >= 0)).all():
            raise CheckpointError(f"sampler state: priority and order must be [{self.capacity}], finite, not negative")
        self._priority, self._order = priority, order
        self._next_order, self._samples = next_order, samples
        self._generator = np.random.Generator(bit_generator)
        self._mass = np.where(order != FREE, priority**self.alpha, 0.0)
        self._cumulative = None

    def _set(self, slots: NDArray[np.int64], priority: NDArray[np.float64]) -> None:
        self._priority[slots] = priority
        self._mass[slots] = self._priority[slots] ** self.alpha
        self._cumulative = None

    def _next_slots(self, n: int) -> NDArray[np.int64]:
        free = np.flatnonzero(self._order == FREE)[:n]
        missing = n - free.size
        if missing == 0:
            return free
        used = np.flatnonzero(self._order != FREE)
        order, first, span = self._order[used], int(self._order[used].min()), missing
        # Order numbers are unique but have gaps: widen the window until it holds enough, then sort the window alone.
        while np.count_nonzero(order < first + span) < missing:
            span *= 2
        oldest = used[order < first + span]
        return np.concatenate([free, oldest[np.argsort(self._order[oldest])][:missing]])

    def _cumulative_mass(self, filter_weights: NDArray[np.floating[Any]] | None) -> NDArray[np.float64]:
        if filter_weights is not None:
            factors = np.asarray(filter_weights, dtype=np.float64)
            if factors.shape != (self.capacity,) or not (np.isfinite(factors) & (factors >= 0)).all():
                raise ValueError(f"filter weights must be [{self.capacity}], finite and not negative")
            return np.cumsum(self._mass * factors)
        if self._cumulative is None:
            self._cumulative = np.cumsum(self._mass)
        return self._cumulative

    def _in_use(self, indices: ArrayLike) -> NDArray[np.int64]:
        slots = np.atleast_1d(np.asarray(indices))
        if slots.size == 0:
            return slots.astype(np.int64)
        if not np.issubdtype(slots.dtype, np.integer) or slots.ndim != 1:
            raise ValueError(f"indices must be a list of whole numbers, got {slots.dtype} of shape {slots.shape}")
        outside = slots[(slots < 0) | (slots >= self.capacity)]
        if outside.size:
            raise ValueError(f"slot {outside[0]} is outside 0..{self.capacity - 1}")
        free = slots[self._order[slots] == FREE]
        if free.size:
            raise ValueError(f"slot {free[0]} holds no trajectory")
        return slots.astype(np.int64)

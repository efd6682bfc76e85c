"""The coefficient in front of the KL penalty, and how it follows a target.

The coefficient is state: it belongs in every checkpoint (`state_dict`, `load_state_dict`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from training.objectives.checks import require_in_range, require_positive

_LARGEST_ERROR = 0.2


class _Coefficient:
    """A non-negative `kl_coef` that can be saved and restored."""

    def __init__(self, kl_coef: float) -> None:
        require_in_range("kl_coef", kl_coef, low=0.0)
        self.kl_coef = float(kl_coef)

    def state_dict(self) -> dict[str, float]:
        """The state to store in a checkpoint: {"kl_coef": float}."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` gave. Raises ValueError for other keys or an impossible coefficient."""
        if set(state) != {"kl_coef"}:
            raise ValueError(f"a KL controller's state has the one key 'kl_coef', got {sorted(state)}")
        require_in_range("kl_coef", state["kl_coef"], low=0.0)
        self.kl_coef = float(state["kl_coef"])


class FixedKLController(_Coefficient):
    """A constant coefficient."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing follows the KL here; present so that a loop need not ask which controller it holds."""


class AdaptiveKLController(_Coefficient):
    """Multiplies the coefficient up while KL is above its target and down while below.

    `target_kl` in nats, `horizon` in the unit of `n_steps`. Source: Ziegler et al. 2019, section 2.2.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(kl_coef)
        require_positive("target_kl", target_kl)
        require_positive("horizon", horizon)
        self.target_kl = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """kl_coef *= 1 + clip(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon.

        Raises ValueError when `current_kl` is NaN, or when one update would turn the coefficient negative (more than
        five horizons of steps at once): a negative one would reward drift.
        """
        current_kl = float(current_kl)
        if math.isnan(current_kl):
            raise ValueError("current_kl is NaN: the KL coefficient cannot follow it")
        require_in_range("n_steps", n_steps, low=0)
        error = min(max(current_kl / self.target_kl - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
        factor = 1.0 + error * n_steps / self.horizon
        if factor < 0:
            raise ValueError(f"{n_steps} steps over a horizon of {self.horizon:g} turn kl_coef negative: raise horizon")
        self.kl_coef *= factor

"""Every objective against its slow float64 oracle: values, gradients, poison in masked slots, splits."""

from __future__ import annotations

import pytest

from tests.training.objectives.battery import CHECKS
from training import objectives


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_agrees_with_the_oracle(name: str) -> None:
    CHECKS[name](objectives)

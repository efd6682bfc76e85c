"""The registry and watch sections refuse nonsense in words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.schema.registry import RegistryConfig, WatchConfig, WatchLimit


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"verify_prompts": ["  "]}, "empty prompt"),
        ({"verify_prompts": []}, "at least 1"),
        ({"tracking_uri": "localhost:5000"}, "write a URI"),
        ({"max_points": 5_000}, "less than or equal to 2000"),
        ({"model": "../x"}, "pattern"),
        ({"modle": "x"}, "Extra inputs"),
    ],
)
def test_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        RegistryConfig(**given)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        RegistryConfig(tracking_uri="postgresql://ada:hunter2@db:5432/mlflow")
    (error,) = refused.value.errors()
    assert error["loc"] == ()
    assert "hunter2" not in error["msg"]


def test_limits_must_bound_something_and_once() -> None:
    with pytest.raises(ValidationError, match="bounds nothing"):
        WatchLimit(metric="reward")
    with pytest.raises(ValidationError, match="no value passes"):
        WatchLimit(metric="reward", min=1, max=0)
    with pytest.raises(ValidationError, match="more than one limit on reward"):
        WatchConfig(limits=[WatchLimit(metric="reward", min=0), WatchLimit(metric="reward", max=1)])

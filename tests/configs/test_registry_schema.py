"""What the registry section refuses."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.schema.registry import RegistryConfig


@pytest.mark.parametrize(
    ("key", "uri"),
    [
        ("tracking_uri", "postgresql://nightjar:hunter2@db/mlflow"),
        ("tracking_uri", "postgresql://nightjar:hunter/2@db/mlflow"),
        ("tracking_uri", "postgresql://db/mlflow?user=nightjar&password=hunter2"),
        ("artifact_location", "s3://AKIA:hunter2@bucket/artifacts"),
    ],
)
def test_a_password_is_refused_and_not_repeated(key: str, uri: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RegistryConfig.model_validate({key: uri})
    (error,) = refused.value.errors()
    assert error["msg"].startswith(f"Value error, {key} holds a password")
    assert "environment" in error["msg"]
    assert error["loc"] == (), "the error of a field would repeat its value"
    assert "hunter" not in error["msg"]


@pytest.mark.parametrize(
    ("key", "uri"),
    [
        ("tracking_uri", "http://127.0.0.1:5000"),
        ("tracking_uri", "postgresql://nightjar@db:5432/mlflow"),
        ("artifact_location", "abfs://container@account/artifacts"),
        ("artifact_location", "s3://bucket/artifacts"),
    ],
)
def test_an_address_without_one_is_taken(key: str, uri: str) -> None:
    assert getattr(RegistryConfig.model_validate({key: uri}), key) == uri

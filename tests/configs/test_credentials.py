"""Passwords in addresses: taken out before anything is stored or said."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.credentials import user_and_password, without_passwords
from configs.errors import NightjarError
from tasks.mlflow_client import tracking_uri_of

WORDS = st.text(min_size=1, max_size=20).filter(lambda words: words.isprintable())
PLACES = st.sampled_from(["mlflow.example.com", "127.0.0.1:5000", "[::1]:5000", "mlflow.example.com:443/a/proxy"])


@given(WORDS, WORDS, PLACES, st.sampled_from(["http", "https"]))
def test_a_log_in_alone_is_taken_out_of_an_address(user: str, password: str, place: str, scheme: str) -> None:
    written = f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{place}"
    assert user_and_password(written) == (f"{scheme}://{place}", (user, password))
    assert without_passwords(f"GET {written} failed") == f"GET {scheme}://***@{place} failed"


@pytest.mark.parametrize(
    "uri",
    ["http://127.0.0.1:5000", "https://host/a:b@c", "sqlite:////h/mlflow.db", "abfs://container@account/x", "http://u@h"],
)
def test_addresses_without_one_stay_as_they_are(uri: str) -> None:
    assert user_and_password(uri) == (uri, None)
    assert without_passwords(uri) == uri


def test_no_error_repeats_a_password_that_a_library_has_quoted() -> None:
    quoted = "API request to http://bob:s3cret@127.0.0.1:1/api/2.0 failed"
    error = NightjarError(f"loading models:/m@champion: {quoted}", f"ask the owner of {quoted}")
    assert "s3cret" not in f"{error} {error.args} {error.message} {error.hint}"
    assert "models:/m@champion" in str(error)
    assert "127.0.0.1:1/api" in str(error)


def test_a_log_in_in_mlflows_variable_moves_to_the_variables_for_it(tmp_path, monkeypatch) -> None:
    import os

    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "another")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://bob:s3%40cret@mlflow.example.com")
    for _ in range(2):
        assert tracking_uri_of(tmp_path, None) == "https://mlflow.example.com"
    assert tracking_uri_of(tmp_path, "http://config:5000") == "http://config:5000"
    kept = [os.environ[f"MLFLOW_TRACKING_{name}"] for name in ("URI", "USERNAME", "PASSWORD")]
    assert kept == ["https://mlflow.example.com", "bob", "s3@cret"]

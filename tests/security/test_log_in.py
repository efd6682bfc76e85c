"""Log-in where the servers offer it: real servers with their own authentication switched on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from configs.errors import NightjarError
from tasks.mlflow_client import SERVER_ENVIRONMENT
from tasks.prefect_health import check_prefect
from tasks.reachability import require_tracking
from tasks.registry_errors import TrackingUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORDS = "nightjar:pl4nted-words"


def test_prefect_lets_in_who_knows_the_words(start, port: int, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{port}/api"
    settings = {
        "PREFECT_SERVER_API_AUTH_STRING": WORDS, "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }  # fmt: skip
    start(["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)], settings, f"{url}/health")
    assert "answers, version 3." in check_prefect(url, {"PREFECT_API_AUTH_STRING": WORDS})
    for wrong in ({}, {"PREFECT_API_AUTH_STRING": "nightjar:guess"}):
        with pytest.raises(NightjarError, match="PREFECT_API_AUTH_STRING") as refused:
            check_prefect(url, wrong)
        assert "guess" not in str(refused.value)
    with pytest.raises(NightjarError, match="must end in /api"):
        check_prefect(f"{url}/nowhere", {"PREFECT_API_AUTH_STRING": WORDS})


def test_mlflow_lets_in_who_has_an_account(start, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{port}"
    accounts = tmp_path / "accounts.ini"
    accounts.write_text(
        "[mlflow]\ndefault_permission = NO_PERMISSIONS\n"
        f"database_uri = sqlite:///{tmp_path}/accounts.db\nadmin_username = admin\n"
        "admin_password = pl4nted-password\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    settings = {"MLFLOW_AUTH_CONFIG_PATH": str(accounts), "MLFLOW_FLASK_SERVER_SECRET_KEY": "pl4nted-key"}
    store = f"sqlite:///{tmp_path}/mlflow.db"
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", store]
    start([*command, "--app-name", "basic-auth", "--workers", "1"], settings | SERVER_ENVIRONMENT, f"{url}/health")
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD", raising=False)
    with pytest.raises(TrackingUnavailable, match="MLFLOW_TRACKING_USERNAME"):
        require_tracking(url, 60.0)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pl4nted-password")
    require_tracking(url, 60.0)


def test_a_server_that_is_away_is_told_with_the_way_out(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(NightjarError, match="does not answer"):
            check_prefect(f"http://user:hidden@127.0.0.1:{port}/api", {})

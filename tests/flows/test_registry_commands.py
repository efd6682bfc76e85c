"""The short commands where there is less around them than usual: no nights, no name of the user."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.errors import ConfigError, NightjarError
from flows.cli import app
from flows.registry_commands import answer, roll_back
from tasks import rollback as rollback_acts
from tasks.promotion import Force, Promotion
from tasks.rollback import Rollback
from tests.stored_nights import run_night


def test_an_address_on_a_server_needs_no_night_in_this_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def reply(site, address, prompt, tokens):
        started.append(site.tracking_uri)
        return f"from {address}"

    monkeypatch.setattr("flows.registry_commands.ask", reply)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(NightjarError, match="has seen no night yet"):
        answer(tmp_path, "models:/team@champion", "well?", 8)
    assert list(tmp_path.iterdir()) == [], "asking makes no database"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5999")
    assert answer(tmp_path, "models:/team@champion", "well?", 8) == "from models:/team@champion"
    assert started == ["http://127.0.0.1:5999"]
    with pytest.raises(NightjarError, match="has seen no night yet"):
        answer(tmp_path, None, "well?", 8)


def test_a_user_without_a_name_may_roll_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numeric user of a container has no line in the password file."""
    run_night(tmp_path, "chat")
    by = []

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 10001")

    def take_down(site, **how):
        by.append(how["by"])
        return Rollback(True, "2", "1", "done")

    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr("tasks.preflight.check_existing_tracking", lambda uri, seconds: None)
    monkeypatch.setattr(rollback_acts, "rollback", take_down)
    assert roll_back(tmp_path, None, "curt") == "done"
    assert by == ["unknown user"]


def test_promote_wants_a_reason_with_force_and_says_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_night(tmp_path, "chat")
    asked: list[tuple[str, str, Force | None]] = []

    def by_hand(site, number, by, force):
        asked.append((site.model, number, force))
        return Promotion(number, "1", True, 0.0)

    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setattr("tasks.preflight.check_existing_tracking", lambda uri, seconds: None)
    monkeypatch.setattr("tasks.promote_by_hand.promote_by_hand", by_hand)
    command = ["promote", "2", "--home", str(tmp_path)]
    for half in (["--force"], ["--why", "read them"]):
        with pytest.raises(ConfigError, match="--force and --why belong together"):
            CliRunner().invoke(app, [*command, *half], catch_exceptions=False)
    told = CliRunner().invoke(app, [*command, "--force", "--why", "read them"])
    assert told.output.strip() == (
        "version 2 of chat-policy is champion, version 1 was it before; its bytes and its answers were verified"
    )
    CliRunner().invoke(app, command)
    assert asked == [("chat-policy", "2", Force("ada", "read them")), ("chat-policy", "2", None)]

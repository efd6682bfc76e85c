"""What of a night reaches Prefect's log, and how loudly."""

from __future__ import annotations

import logging

import pytest

from flows.flow_log import FlowLog
from tasks.progress import Silent

ORDINARY = [
    ("validating", {"doing": "reading", "rows": 100}),
    ("round", {"round": 0, "answers": 16, "reward_mean": 0.1}),
    ("best_round", {"round": 1, "score": 0.5}),
    ("early_stop", {"round": 1, "step": 4, "approx_kl": 0.1, "limit": 0.05}),
]
ALARMING = [
    ("died", {"attempt": 1, "how": "was killed"}),
    ("waiting", {"message": "no worker has taken it"}),
    ("guard", {"sentence": "kl_ref above 0.3", "action": "warn"}),
    ("mitigation", {"kind": "reduce_lr"}),
    ("rollback", {"sentence": "kl_ref above 0.3"}),
    ("checkpoint_refused", {"reason": "torn"}),
    ("step_not_applied", {"step": 3, "reason": "loss or gradient not finite"}),
    ("something_new", {}),
]


def log_of(caplog: pytest.LogCaptureFixture) -> FlowLog:
    caplog.set_level(logging.DEBUG, logger="night")
    return FlowLog(Silent(), logging.getLogger("night"))


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records]


@pytest.mark.parametrize(("kind", "fields"), ORDINARY)
def test_ordinary_progress_is_information(caplog: pytest.LogCaptureFixture, kind: str, fields: dict) -> None:
    log_of(caplog).stage_event("ppo", kind, fields)
    assert levels(caplog) == [logging.INFO]


@pytest.mark.parametrize(("kind", "fields"), ALARMING)
def test_what_a_person_should_look_at_is_a_warning(
    caplog: pytest.LogCaptureFixture, kind: str, fields: dict
) -> None:
    log_of(caplog).stage_event("ppo", kind, fields)
    assert levels(caplog) == [logging.WARNING]


def test_a_good_stage_warns_of_nothing_and_tells_its_attempts(caplog: pytest.LogCaptureFixture) -> None:
    log = log_of(caplog)
    log.stage_started("ppo", 2)
    log.stage_moved("ppo", 1, 9, {"loss": 0.5})
    log.stage_ended("ppo", "done", 3.0)
    log.note("night n-0001 begins")
    assert set(levels(caplog)) == {logging.INFO}
    assert "ppo starts, attempt 2" in caplog.messages

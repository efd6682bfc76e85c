"""Messages through real notification blocks of a Prefect server, to a web server of this test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from prefect.blocks.system import Secret
from prefect.testing.utilities import prefect_test_harness

from tasks.notify import NotifyError, check_blocks, notify
from tests.webhook import SECRET, Webhook, listening_webhook


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with listening_webhook() as server:
        yield server


def test_a_message_arrives(webhook: Webhook) -> None:
    check_blocks(["custom-webhook/ops"])
    assert notify(["custom-webhook/ops"], "rolled back", "version 3 is champion again") == []
    assert webhook.heard == [{"subject": "rolled back", "text": "version 3 is champion again"}]


def test_no_block_is_fine() -> None:
    assert notify([], "x", "y") == []


def test_a_block_that_refuses_is_told_without_its_address(webhook: Webhook, caplog: pytest.LogCaptureFixture) -> None:
    webhook.status = 500
    with caplog.at_level(logging.WARNING):
        (problem,) = notify(["custom-webhook/ops"], "x", "y")
    assert "custom-webhook/ops did not take the message" in problem
    assert "did not take the message" in caplog.text
    assert SECRET not in problem + caplog.text


def test_one_that_fails_keeps_nobody_from_hearing(webhook: Webhook) -> None:
    problems = notify(["custom-webhook/gone", "custom-webhook/ops"], "x", "y")
    assert [("custom-webhook/gone" in problem) for problem in problems] == [True]
    assert len(webhook.heard) == 1


@pytest.mark.parametrize("name", ["ops", "Slack/ops", "a/b/c", ""])
def test_what_does_not_name_a_block_is_refused(name: str) -> None:
    with pytest.raises(NotifyError, match="does not name a block"):
        check_blocks([name])


def test_a_block_of_another_kind_is_refused() -> None:
    Secret(value="x").save("token", overwrite=True)
    with pytest.raises(NotifyError, match="no notification block"):
        check_blocks(["secret/token"])

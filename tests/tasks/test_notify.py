"""Messages through real notification blocks of a Prefect server, to a web server of this test."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.blocks.system import Secret
from prefect.testing.utilities import prefect_test_harness

from tasks.notify import NotifyError, check_blocks, notify

SECRET = "s3cret-webhook-path"


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


class Webhook(HTTPServer):
    """Remembers what it was told; answers `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.heard: list[dict] = []
        self.status = 200


class Answer(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        self.server.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Be quiet."""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    server = Webhook()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def save_block(webhook: Webhook) -> None:
    CustomWebhookNotificationBlock(
        name="ops",
        url=f"http://127.0.0.1:{webhook.server_port}/{SECRET}",
        json_data={"subject": "{{subject}}", "text": "{{body}}"},
    ).save("ops", overwrite=True)


def test_a_message_arrives(webhook: Webhook) -> None:
    save_block(webhook)
    check_blocks(["custom-webhook/ops"])
    assert notify(["custom-webhook/ops"], "rolled back", "version 3 is champion again") == []
    assert webhook.heard == [{"subject": "rolled back", "text": "version 3 is champion again"}]


def test_no_block_is_fine() -> None:
    assert notify([], "x", "y") == []


def test_a_block_that_refuses_is_told_without_its_address(webhook: Webhook, caplog: pytest.LogCaptureFixture) -> None:
    save_block(webhook)
    webhook.status = 500
    with caplog.at_level(logging.WARNING):
        (problem,) = notify(["custom-webhook/ops"], "x", "y")
    assert "custom-webhook/ops did not take the message" in problem
    assert "did not take the message" in caplog.text
    assert SECRET not in problem + caplog.text


def test_one_that_fails_keeps_nobody_from_hearing(webhook: Webhook) -> None:
    save_block(webhook)
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

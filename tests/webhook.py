"""A web server that hears what Nightjar tells people through a real notification block."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from prefect.blocks.notifications import CustomWebhookNotificationBlock

BLOCK = "custom-webhook/ops"
SECRET = "s3cret-webhook-path"


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


@contextmanager
def listening_webhook() -> Iterator[Webhook]:
    """The server at work, and the block BLOCK of the present Prefect server that leads to it."""
    server = Webhook()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    CustomWebhookNotificationBlock(
        name="ops",
        url=f"http://127.0.0.1:{server.server_port}/{SECRET}",
        json_data={"subject": "{{subject}}", "text": "{{body}}"},
    ).save("ops", overwrite=True)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

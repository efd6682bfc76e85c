"""What `nightjar doctor` says of data and clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from configs.schema import load_config
from configs.schema.night import NightConfig
from tasks.doctor import Finding, examine
from tasks.server_clocks import clocks_apart

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
SOUND = '{"prompt": "p%d", "chosen": "yes", "rejected": "no"}\n'


class _Clock(BaseHTTPRequestHandler):
    ahead, status = 0.0, 200

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + self.ahead)

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), _Clock)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    thread.join()
    served.server_close()


def found(about: str, home: Path, config: NightConfig | None) -> Finding:
    (finding,) = [finding for finding in examine(home, config) if finding.about == about]
    return finding


def with_data(folder: Path, text: str) -> NightConfig:
    (folder / "pairs.jsonl").write_text(text)
    return sourced(folder / "pairs.jsonl")


def sourced(file: Path) -> NightConfig:
    return load_config(QUICKSTART, [f"data.source={file}", "data.quickstart=null", "models.base=models/mine"])


@pytest.mark.parametrize(
    ("text", "health", "words"),
    [
        ("".join(SOUND % row for row in range(20)), "good", "20 rows read"),
        ("".join(SOUND % row for row in range(20)) + "{broken\n", "look", "1 of them for quarantine"),
        ("", "bad", "put data there"),
    ],
)
def test_data_are_looked_at(tmp_path: Path, text: str, health: str, words: str) -> None:
    finding = found("data", tmp_path / "home", with_data(tmp_path, text))
    assert finding.health == health
    assert words in finding.sentence


def test_data_that_are_not_there_and_data_that_are_made(tmp_path: Path) -> None:
    assert found("data", tmp_path / "home", sourced(tmp_path / "nowhere.jsonl")).health == "bad"
    assert "generator" in found("data", tmp_path / "home", load_config(QUICKSTART)).sentence


@pytest.mark.parametrize("status", [200, 403])
@pytest.mark.parametrize(("ahead", "words"), [(0, None), (600, "ahead of"), (-600, "behind")])
def test_clocks_of_servers_are_compared(server: str, monkeypatch, tmp_path: Path, ahead, words, status) -> None:
    monkeypatch.setattr(_Clock, "ahead", ahead)
    monkeypatch.setattr(_Clock, "status", status)
    monkeypatch.setenv("PREFECT_API_URL", f"{server}/api")
    finding = found("clock", tmp_path, None)
    assert finding.health == ("good" if words is None else "look")
    assert words is None or (f"s {words} this machine's" in finding.sentence and "NTP" in finding.sentence)


def test_a_server_that_is_away_has_no_clock() -> None:
    assert clocks_apart([("Prefect", "http://127.0.0.1:9/api/health")]) == []

"""What a command says whose Prefect server went away for good; faults/test_servers_away kills a real one."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from configs.errors import NightjarError
from flows.exit_codes import DONE, REJECTED
from flows.run_command import _started
from flows.server_gone import ServerGone, told_by_record
from tasks.night_state import NightBook
from tests.stored_nights import run_night

GONE = ServerGone("the Prefect server does not answer any more (ConnectError)", "start it")


def ended(home: Path, **fields: object) -> None:
    run_night(home, "q", when=100.0)
    book = NightBook(home)
    book.change(book.load("q-0001"), ended=200.0, **fields)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"verdict": "PASS", "promoted": True, "version": "7"}, DONE, "PASS, version 7 is champion"),
        ({"verdict": "FAIL", "reason": "reward"}, REJECTED, "FAIL, reward"),
        ({"status": "skipped"}, DONE, "skipped"),
    ],
)
def test_a_night_that_came_to_its_end_is_told_by_its_record(tmp_path: Path, capsys, fields, code, words) -> None:
    ended(tmp_path, **fields)
    assert told_by_record(tmp_path, "q", 150.0, GONE) == code
    assert words in capsys.readouterr().err


def test_one_that_failed_or_stopped_half_way_is_to_be_repeated(tmp_path: Path) -> None:
    ended(tmp_path, status="failed", reason="the disk is full")
    with pytest.raises(NightjarError, match=r"(?s)the disk is full.*repeat the command"):
        told_by_record(tmp_path, "q", 150.0, GONE)
    for chain, since in (("q", 250.0), ("another", 150.0)):  # nothing of this command's has ended
        with pytest.raises(ServerGone):
            told_by_record(tmp_path, chain, since, GONE)


def test_only_a_server_that_is_silent_is_called_gone() -> None:
    def lost() -> None:
        raise httpx.ConnectError("refused")

    def broken() -> None:
        raise ValueError("a defect")

    with pytest.raises(ServerGone, match="ConnectError"):
        _started(lost)
    with pytest.raises(ValueError, match="a defect"):
        _started(broken)

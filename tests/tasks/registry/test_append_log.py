"""The append-only log: what is in it survives any death of a writer, and nothing is ever merged."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.append_log import AppendLog
from tasks.registry_errors import JournalError

TEXT = st.text(max_size=12)


def test_numbers_lines_from_one(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "deep" / "log.jsonl")
    assert log.read().records == ()
    assert [log.append({"x": x})["seq"] for x in "ab"] == [1, 2]
    assert [record["x"] for record in log.read().records] == ["a", "b"]


def test_a_record_cannot_bring_its_own_number(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "log.jsonl")
    assert log.append({"seq": 40, "x": 1})["seq"] == 1


@given(values=st.lists(TEXT, min_size=1, max_size=4), cut=st.integers(min_value=1, max_value=400), after=TEXT)
def test_a_log_cut_anywhere_keeps_its_whole_lines_and_seals_the_rest(
    tmp_path_factory: pytest.TempPathFactory, values: list[str], cut: int, after: str
) -> None:
    log = AppendLog(tmp_path_factory.mktemp("log") / "log.jsonl")
    for value in values:
        log.append({"x": value})
    content = log.path.read_bytes()
    kept = content[: max(0, len(content) - cut)]
    log.path.write_bytes(kept)
    whole, has_fragment = kept.count(b"\n"), bool(kept) and not kept.endswith(b"\n")

    before = log.read()
    log.append({"x": after})
    then = log.read()

    assert [record["x"] for record in before.records] == values[:whole]
    assert [record["x"] for record in then.records] == [*values[:whole], after]
    assert before.torn == then.torn == int(has_fragment)


def test_a_complete_line_without_its_newline_does_not_count_later_either(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "log.jsonl")
    log.append({"x": 1})
    with log.path.open("ab") as stream:
        stream.write(b'{"seq": 2, "x": 2}')
    log.append({"x": 3})
    assert [record["x"] for record in log.read().records] == [1, 3]
    assert log.read().torn == 1


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (['{"seq": 1}', "nonsense", '{"seq": 2}'], "line 2 is not JSON"),
        (['{"seq": 1}', '{"seq": 3}'], "line 2 does not carry seq 2"),
        (['{"seq": 1}', '{"seq": 1}'], "line 2 does not carry seq 2"),
        (["[1]"], "line 1 does not carry seq 1"),
    ],
)
def test_edited_logs_are_refused_with_the_line(tmp_path: Path, lines: list[str], complaint: str) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(JournalError, match=complaint):
        AppendLog(file).read()


def test_nan_is_refused_and_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append({"x": float("nan")})
    assert log.append({"x": 1})["seq"] == 1


def _append_many(file: Path, who: int) -> None:
    for x in range(30):
        AppendLog(file).append({"who": who, "x": x})


def test_two_writers_never_mix_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(file, who)) for who in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    records = AppendLog(file).read().records
    assert [record["seq"] for record in records] == list(range(1, 61))
    assert [record["x"] for record in records if record["who"] == 1] == list(range(30))
    assert all(json.loads(line) for line in file.read_text().splitlines())

"""Files, folders and URIs become a stream of records; what cannot be read is named by file and row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from training.data import reading
from training.data.reading import RawRow, open_source, read_rows, source_digest
from training.data.reasons import Reason
from training.errors import DataError

ROWS = [{"prompt": f"q{number}", "chosen": "a", "rejected": "b"} for number in range(5)]


def write_jsonl(path: Path, rows: list[object] = ROWS) -> Path:  # type: ignore[assignment]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    return path


def read(uri: object) -> list[RawRow]:
    return list(read_rows(open_source(str(uri))))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "a.json", "a.json.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    rows = read(write_jsonl(tmp_path / name))
    assert [row.values for row in rows] == ROWS
    assert [row.row for row in rows] == [1, 2, 3, 4, 5]
    assert {(row.file, row.partition) for row in rows} == {(name, "a")}


def test_parquet(tmp_path: Path) -> None:
    rows = read(write_parquet(tmp_path / "a.parquet"))
    assert [row.values for row in rows] == ROWS
    assert [row.row for row in rows] == [1, 2, 3, 4, 5]


def test_folder_is_read_in_the_order_of_its_dates(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "date=2025-01-02" / "x.jsonl", [{"n": 3}])
    write_parquet(tmp_path / "2024-12-31" / "part-0.parquet")
    write_jsonl(tmp_path / "date=2025-01-01" / "hour=03" / "x.jsonl.gz", [{"n": 2}])
    write_jsonl(tmp_path / "2025-01-03.jsonl", [{"n": 4}])
    for ignored in ("_SUCCESS", "notes.txt", ".hidden/x.jsonl", "_temporary/y.jsonl"):
        write_jsonl(tmp_path / ignored, [{"n": 0}])
    rows = read(tmp_path)
    partitions = list(dict.fromkeys(row.partition for row in rows))
    assert partitions == ["2024-12-31", "2025-01-01/03", "2025-01-02", "2025-01-03"]
    assert [row.values["n"] for row in rows if row.values and "n" in row.values] == [2, 3, 4]


def test_uris_of_pyarrow_and_fsspec(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    assert len(read((tmp_path / "a.jsonl").as_uri())) == 5
    with fsspec.open("memory://nightjar/d1/a.jsonl", "wb") as stream:
        stream.write(b'{"n": 1}\n')
    assert [(row.values, row.partition) for row in read("memory://nightjar")] == [({"n": 1}, "d1")]


def test_bad_lines_are_problems_with_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n{"n": \n[1]\n{"n": "\xff"}\n{"n": 2}')
    rows = read(path)
    assert [(row.row, row.problem.reason if row.problem else None) for row in rows] == [
        (1, None),
        (3, Reason.UNREADABLE_JSON),
        (4, Reason.NOT_AN_OBJECT),
        (5, Reason.INVALID_UTF8),
        (6, None),
    ]
    assert rows[0].values == {"n": 1}


def test_a_number_of_thousands_of_digits_is_a_problem_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": ' + "9" * 5000 + "}\n")
    assert [row.problem.reason if row.problem else None for row in read(tmp_path / "a.jsonl")] == [
        None, Reason.UNREADABLE_JSON,
    ]  # fmt: skip


def test_a_date_outside_the_calendar_is_a_problem_of_its_row(tmp_path: Path) -> None:
    table = pa.table({"n": [1, 2], "day": pa.array([0, 2**30], pa.int32()).view(pa.date32())})
    pq.write_table(table, tmp_path / "a.parquet")
    rows = read(tmp_path / "a.parquet")
    assert [row.problem.reason if row.problem else None for row in rows] == [None, Reason.WRONG_TYPE]


def test_invalid_utf8_in_parquet_is_a_problem_of_its_row(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffc")]
    )
    pq.write_table(pa.table({"t": broken}), tmp_path / "a.parquet")
    rows = read(tmp_path / "a.parquet")
    assert [row.values for row in rows] == [{"t": "a"}, None, {"t": "c"}]
    assert rows[1].problem is not None
    assert rows[1].problem.reason is Reason.INVALID_UTF8


def test_missing_file_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder") as caught:
        open_source(str(tmp_path / "none.parquet"))
    assert "relative paths start at the working folder" in str(caught.value.hint)


def test_other_files_empty_folders_and_unknown_schemes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match="not a parquet"):
        open_source(str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match="holds no parquet"):
        open_source(str(tmp_path))
    with pytest.raises(DataError, match="neither pyarrow nor fsspec"):
        open_source("nonsense://bucket/x.parquet")


def test_unreadable_parquet_names_the_file(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d" / "good.parquet")
    (tmp_path / "d" / "torn.parquet").write_bytes((tmp_path / "d" / "good.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"torn\.parquet: not readable as parquet after row 0"):
        read(tmp_path / "d")


def test_torn_pages_name_the_row_reached(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"t": [f"{number:064d}" * 40 for number in range(8000)]})
    pq.write_table(table, path, row_group_size=2000, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content[start : start + 400] = b"\xff" * 400
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"a\.parquet: not readable as parquet after row [1-9]"):
        read(path)


def test_truncated_gzip_names_the_row_reached(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.gz", [{"n": number, "t": "x" * (number % 97)} for number in range(20_000)])
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: not readable after row [1-9]"):
        read(path)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: not readable after row 0"):
        read(path)


def test_json_array_is_told_to_become_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    with pytest.raises(DataError, match="one object a line"):
        read(tmp_path / "a.json")


def test_digest_follows_contents_and_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / "a.jsonl")
    before = source_digest(str(tmp_path / "d"))
    assert source_digest(str(tmp_path / "d")) == before
    write_jsonl(tmp_path / "d" / "b.jsonl", [{"n": 1}])
    with_more = source_digest(str(tmp_path / "d"))
    write_jsonl(tmp_path / "d" / "b.jsonl", [{"n": 2}])
    assert len({before, with_more, source_digest(str(tmp_path / "d"))}) == 3


class Refusing(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
    """A store that shows its root and then breaks: no permission below it, or no network."""

    breaks_at = "find"

    def find(self, path, *args, **kwargs):
        if self.breaks_at == "find":
            raise PermissionError(13, "Permission denied", path)
        return super().find(path, *args, **kwargs)

    def _open(self, path, *args, **kwargs):
        if self.breaks_at == "open" and path.endswith("2.jsonl"):
            raise OSError("connection reset: s3://KEY:hunter2@store")
        return super()._open(path, *args, **kwargs)


def refusing(monkeypatch: pytest.MonkeyPatch, breaks_at: str) -> None:
    store = Refusing(skip_instance_cache=True)
    for name in ("1.jsonl", "2.jsonl"):
        store.pipe(f"/store/{name}", b"{}")
    store.breaks_at = breaks_at
    filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(store))
    monkeypatch.setattr(reading, "_filesystem", lambda uri: (filesystem, "/store"))


def test_a_folder_that_may_not_be_read_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, "find")
    with pytest.raises(DataError, match=r"data\.source s3://store: cannot be read: .*Permission denied") as caught:
        open_source("s3://store")
    assert "permissions" in (caught.value.hint or "")


def test_a_network_that_breaks_while_hashing_names_the_file_and_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, "open")
    with pytest.raises(DataError, match=r"2\.jsonl: cannot be read: .*connection reset") as caught:
        source_digest("s3://KEY:hunter2@store")
    assert "hunter2" not in str(caught.value)

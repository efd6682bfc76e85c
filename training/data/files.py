"""The two kinds of data file, each read as (row number, record or None, problem or None)."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from training.data.reasons import Problem, Reason
from training.errors import DataError

Read = tuple[int, Mapping[str, Any] | None, Problem | None]
BATCH_ROWS = 1024


def read_parquet(filesystem: pafs.FileSystem, path: str, name: str) -> Iterator[Read]:
    """Rows of a parquet file. Raises DataError naming the file and the row reached."""
    row = 0
    try:
        with filesystem.open_input_file(path) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=BATCH_ROWS):
                for values, problem in _records(batch):
                    row += 1
                    yield row, values, problem
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{name}: not readable as parquet after row {row}: {_first_line(error)}",
            "write the file again; a copy that broke off is the usual cause",
        ) from None


def _records(batch: pa.RecordBatch) -> Iterator[tuple[Mapping[str, Any] | None, Problem | None]]:
    try:
        for record in batch.to_pylist():
            yield record, None
    except (ValueError, OverflowError):
        # Some text of the batch is not UTF-8, or some date lies outside the calendar: find out which rows.
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0], None
            except UnicodeDecodeError:
                yield None, Problem(Reason.INVALID_UTF8)
            except (ValueError, OverflowError):
                yield None, Problem(Reason.WRONG_TYPE, "a date or number that Python cannot hold")


def read_jsonl(filesystem: pafs.FileSystem, path: str, name: str) -> Iterator[Read]:
    """Lines of a JSONL file, gzipped or not. A bad line is a problem, a broken file a DataError naming the row."""
    row = 0
    try:
        with filesystem.open_input_file(path) as stream, _plain(stream, path) as lines:
            for row, line in enumerate(lines, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if row == 1 else line
                if row == 1 and line.lstrip()[:1] == b"[":
                    raise DataError(f"{name}: a JSON array", "write JSON lines instead: one object a line")
                if line.strip():
                    yield row, *_parse(line)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{name}: not readable after row {row}: {_first_line(error)}",
            "write the file again; a copy that broke off is the usual cause",
        ) from None


def _plain(stream: pa.NativeFile, path: str) -> IO[bytes]:
    """The file's bytes, unzipped where its name says so, buffered for reading by lines."""
    return gzip.open(stream, "rb") if path.lower().endswith(".gz") else io.BufferedReader(stream)


def _parse(line: bytes) -> tuple[Mapping[str, Any] | None, Problem | None]:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return None, Problem(Reason.INVALID_UTF8)
    except (ValueError, RecursionError):  # also numbers of thousands of digits, which Python refuses to read
        return None, Problem(Reason.UNREADABLE_JSON)
    if not isinstance(values, dict):
        return None, Problem(Reason.NOT_AN_OBJECT)
    return values, None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

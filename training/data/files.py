"""The two kinds of data file, each read as (row number, record or None, problem or None)."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from training.data.reasons import Problem, Reason
from training.errors import DataError

Read = tuple[int, Mapping[str, Any] | None, Problem | None]
BATCH_ROWS = 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_parquet(filesystem: pafs.FileSystem, path: str, name: str, only: int | None = None) -> Iterator[Read]:
    """Rows of a parquet file; `only` the first ones, without loading more. Raises DataError naming file and row."""
    row, batch_rows = 0, BATCH_ROWS if only is None else min(only, BATCH_ROWS)
    try:
        with filesystem.open_input_file(path) as stream:
            parquet = pq.ParquetFile(stream, pre_buffer=only is None)
            for batch in parquet.iter_batches(batch_size=batch_rows):
                for values, problem in _records(batch):
                    row += 1
                    yield row, values, problem
                    if row == only:
                        return
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


def read_jsonl(filesystem: pafs.FileSystem, path: str, name: str, only: int | None = None) -> Iterator[Read]:
    """Lines of a JSONL file, gzipped or not; `only` the first ones. A bad line is a problem, a broken file a DataError
    naming the row."""
    row = 0
    try:
        with filesystem.open_input_file(path) as stream, _plain(stream, path) as lines:
            _refuse_array(lines, name)
            for row, line in enumerate(islice(lines, only), start=1):
                line = line.removeprefix(_BYTE_ORDER_MARK) if row == 1 else line
                if line.strip():
                    yield row, *_parse(line)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{name}: not readable after row {row}: {_first_line(error)}",
            "write the file again; a copy that broke off is the usual cause",
        ) from None


def _refuse_array(lines: gzip.GzipFile | io.BufferedReader, name: str) -> None:
    """Before any line is read: an array is one line, as long as the whole file."""
    if lines.peek(64).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"[":
        raise DataError(f"{name}: a JSON array", "write JSON lines instead: one object a line")


def _plain(stream: pa.NativeFile, path: str) -> gzip.GzipFile | io.BufferedReader:
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

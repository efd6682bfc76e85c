"""Two files that rows flow into while a source is read: sound rows (for a second look) and quarantined ones."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from training.data.reasons import Dropped, Problem
from training.data.schema import ROW_SCHEMA, Row

_BATCH = 1024
LEFT_OUT = "left out; not counted against data.max_quarantine"
"""Detail of rows that are sound: duplicates, and what evaluation must not share with training."""
_SPOOL_SCHEMA = ROW_SCHEMA.append(pa.field("file", pa.string())).append(pa.field("row", pa.int64()))
QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("partition", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("content", pa.string()),
    ]
)


@dataclass(frozen=True)
class Spooled:
    """A sound row and where it came from."""

    row: Row
    file: str
    number: int


class RowSpool:
    """Sound rows on disk, in order: written once, then read by number or from the start, so texts never fill memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[dict[str, Any]] = []
        self._writer: Any = pa.ipc.new_file(str(path), _SPOOL_SCHEMA)
        self._reader: Any = None
        self._starts = [0]

    def __len__(self) -> int:
        return self._starts[-1] + len(self._pending)

    def append(self, row: Row, file: str, number: int) -> None:
        """Add a row."""
        self._pending.append(row.record() | {"file": file, "row": number})
        if len(self._pending) == _BATCH:
            self._flush()

    def seal(self) -> None:
        """No more rows; open for reading."""
        self._flush()
        self._writer.close()
        self._reader = pa.ipc.open_file(pa.memory_map(str(self._path)))

    def fetch(self, index: int) -> Spooled:
        """The row with this index."""
        batch = bisect.bisect_right(self._starts, index) - 1
        record = self._reader.get_batch(batch).slice(index - self._starts[batch], 1).to_pylist()[0]
        return Spooled(Row.from_record(record), record["file"], record["row"])

    def __iter__(self) -> Iterator[Spooled]:
        for batch in range(self._reader.num_record_batches):
            for record in self._reader.get_batch(batch).to_pylist():
                yield Spooled(Row.from_record(record), record["file"], record["row"])

    def discard(self) -> None:
        """Remove the file."""
        if self._reader is None:
            self._writer.close()
        self._reader = None
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_pylist(self._pending, schema=_SPOOL_SCHEMA))
            self._starts.append(self._starts[-1] + len(self._pending))
            self._pending = []


class Quarantine:
    """quarantine.parquet: refused and left-out rows with file, row number, reason and content: nothing is lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[dict[str, Any]] = []
        self._writer = pq.ParquetWriter(path, QUARANTINE_SCHEMA, compression="zstd")
        self._open = True

    def add(self, file: str, row: int, partition: str, problem: Problem, content: Mapping[str, Any] | None) -> None:
        """Refuse a row. `content` is None where it could not be read at all."""
        self._add(file, row, partition, str(problem.reason), problem.detail, content)

    def leave_out(self, file: str, row: int, partition: str, why: Dropped, content: Mapping[str, Any] | None) -> None:
        """Keep a sound row that is not used, with the reason; it counts not as refused."""
        self._add(file, row, partition, str(why), LEFT_OUT, content)

    def _add(
        self, file: str, row: int, partition: str, reason: str, detail: str, content: Mapping[str, Any] | None
    ) -> None:
        # ASCII escapes keep what Arrow could not: lone surrogates and other half characters.
        text = None if content is None else json.dumps(content, ensure_ascii=True, default=str)
        self._pending.append(
            {"file": file, "row": row, "partition": partition, "reason": reason, "detail": detail, "content": text}
        )
        if len(self._pending) == _BATCH:
            self._flush()

    def close(self) -> None:
        """Finish the file; closing twice is closing once."""
        if self._open:
            self._flush()
            self._writer.close()
            self._open = False

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_pylist(self._pending, schema=QUARANTINE_SCHEMA))
            self._pending = []

"""The first look at a source: every record is normalised and checked, and goes to the spool or to quarantine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from configs.credentials import without_credentials
from configs.schema.data import DataConfig
from training.data.checks import PairLedger, check_row
from training.data.formats import Shape, choose_shape, normalise
from training.data.near_duplicates import BandKeys, Fields, band_keys, fields_of
from training.data.reading import RawRow, Source, read_rows
from training.data.reasons import Dropped, Problem, Reason
from training.data.schema import Row
from training.data.spool import Quarantine, RowSpool
from training.data.tally import Tally
from training.errors import DataError

Progress = Callable[[str, int], None]
"""Called now and then with what is being done and the rows done so far."""
SAMPLE_ROWS = 200
PROGRESS_ROWS = 2_000


@dataclass
class Gathered:
    """Sound rows by number: ids, partitions and likeness keys (their texts are in the spool), and the tally."""

    shape: str
    tally: Tally = field(default_factory=Tally)
    ledger: PairLedger = field(default_factory=PairLedger)
    prompt_ids: list[str] = field(default_factory=list)
    row_ids: list[str] = field(default_factory=list)
    partitions: list[str] = field(default_factory=list)
    keys: list[BandKeys] = field(default_factory=list)

    def key_matrix(self) -> npt.NDArray[np.uint64]:
        """[rows, bands] likeness keys; empty when the near checks are off."""
        return np.stack(self.keys) if self.keys else np.empty((0, 0), dtype=np.uint64)


def gather(source: Source, config: DataConfig, spool: RowSpool, quarantine: Quarantine, progress: Progress) -> Gathered:
    """Read, normalise and check every record. Raises DataError for an empty source, wrong columns or a broken file."""
    rows = read_rows(source)
    head = list(islice(rows, SAMPLE_ROWS))
    readable = [raw.values for raw in head if raw.values is not None]
    if not head:
        raise DataError(
            f"data.source {without_credentials(source.uri)}: no rows in {len(source.files)} file(s)",
            "put data there, or name another source",
        )
    if not readable:
        raise _nothing_readable(source, head)
    shape = choose_shape(config, readable, head[0].file)
    gathered = Gathered(shape.NAME)
    default_source = config.default_source or source.name
    for count, raw in enumerate(chain(head, rows), start=1):
        gathered.tally.count_read(raw.partition)
        if count % PROGRESS_ROWS == 0:
            progress("reading", count)
        try:
            row = _sound(raw, shape, config, default_source)
        except Problem as problem:
            quarantine.add(raw.file, raw.row, raw.partition, problem, raw.values)
            gathered.tally.count_quarantined(problem.reason, raw.partition, f"{raw.file} row {raw.row}")
            continue
        _take(row, raw, config, gathered, spool, quarantine)
    return gathered


def row_fields(row: Row) -> Fields:
    """What decides whether two rows are nearly the same: the prompt's turns, and each answer."""
    return fields_of(row.prompt_text, *row.answers())


def _sound(raw: RawRow, shape: Shape, config: DataConfig, default_source: str) -> Row:
    if raw.values is None:
        raise raw.problem or Problem(Reason.UNREADABLE_JSON)
    row = normalise(raw.values, shape, config, raw.partition, default_source)
    check_row(row, config)
    return row


def _take(
    row: Row, raw: RawRow, config: DataConfig, gathered: Gathered, spool: RowSpool, quarantine: Quarantine
) -> None:
    if gathered.ledger.is_duplicate(len(spool), row):
        quarantine.leave_out(raw.file, raw.row, raw.partition, Dropped.EXACT_DUPLICATE, raw.values)
        gathered.tally.count_fate(Dropped.EXACT_DUPLICATE, raw.partition)
        return
    spool.append(row, raw.file, raw.row)
    gathered.prompt_ids.append(row.prompt_id)
    gathered.row_ids.append(row.row_id)
    gathered.partitions.append(raw.partition)
    if config.near_duplicate_threshold is not None:
        gathered.keys.append(band_keys(row_fields(row)))


def _nothing_readable(source: Source, head: list[RawRow]) -> DataError:
    first, shown = next(iter(_problems(head))), without_credentials(source.uri)
    return DataError(
        f"{head[0].file}: none of the first {len(head)} rows of {shown} can be read ({first.reason})",
        "write JSON lines (one object a line, UTF-8) or parquet",
    )


def _problems(head: list[RawRow]) -> Iterator[Problem]:
    return (raw.problem for raw in head if raw.problem is not None)

"""The immutable snapshot: three parquet files and a manifest in a folder named by their digest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract import fsync_folder, read_json, sha256_file, write_json
from training.data.schema import ROW_SCHEMA, SCHEMA_VERSION, Row, rows_of
from training.data.splits import Split
from training.errors import ContractError, DataError

MANIFEST = "manifest.json"
ROW_GROUP = 4096


@dataclass(frozen=True)
class SnapshotRef:
    """What flows carry instead of rows. `sha256` is of the rows' content, whatever version of pyarrow wrote them."""

    uri: str
    sha256: str
    num_rows: int


@dataclass(frozen=True)
class SnapshotManifest:
    """What manifest.json says. `rows` and `files` (sha256 of bytes) are by split."""

    sha256: str
    evaluation_sha256: str
    rows: Mapping[str, int]
    files: Mapping[str, str]
    shape: str
    split: Mapping[str, Any]
    schema_version: int = SCHEMA_VERSION

    @property
    def num_rows(self) -> int:
        """Rows of all three splits."""
        return sum(self.rows.values())


class SnapshotWriter:
    """Writes the three files beside their final place; `finish` names the folder by content and reads it back.

    Use as a context manager: what was not finished is removed.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self._parent = parent
        self._folder = Path(tempfile.mkdtemp(prefix=".writing-", dir=parent))
        self._splits = {split: _SplitWriter(self._folder / f"{split}.parquet") for split in Split}

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._splits.values():
            writer.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, split: Split, row: Row) -> None:
        """Append a row to a split."""
        self._splits[split].write(row)

    @property
    def rows(self) -> dict[str, int]:
        """Rows written so far, by split."""
        return {str(split): writer.rows for split, writer in self._splits.items()}

    def finish(self, shape: str, split_settings: Mapping[str, Any]) -> SnapshotRef:
        """Write the manifest, move the folder to its name and verify it. An equal snapshot that is whole is kept."""
        for writer in self._splits.values():
            writer.close()
        digest = hashlib.sha256(json.dumps([SCHEMA_VERSION, dict(split_settings)], sort_keys=True).encode())
        for split, writer in self._splits.items():
            digest.update(f"{split}:{writer.digest.hexdigest()}\n".encode())
        manifest = SnapshotManifest(
            sha256=digest.hexdigest(),
            evaluation_sha256=_prompt_set_digest(self._splits[Split.EVALUATION].prompt_ids),
            rows=self.rows,
            files={str(split): sha256_file(writer.path) for split, writer in self._splits.items()},
            shape=shape,
            split=split_settings,
        )
        write_json(self._folder / MANIFEST, asdict(manifest))
        return self._place(manifest)

    def _place(self, manifest: SnapshotManifest) -> SnapshotRef:
        final = self._parent / manifest.sha256[:16]
        if final.exists():
            try:
                return open_snapshot(final)
            except DataError:
                shutil.rmtree(final)  # torn or tampered with: the same rows are about to take its place
        os.replace(self._folder, final)
        fsync_folder(self._parent)
        return open_snapshot(final)


class _SplitWriter:
    """One parquet file, row group by row group, and the digest of what went in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self.digest = hashlib.sha256()
        self.prompt_ids: set[str] = set()
        self._keep_prompts = path.stem == Split.EVALUATION
        self._pending: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = pq.ParquetWriter(path, ROW_SCHEMA, compression="zstd", version="2.6")

    def write(self, row: Row) -> None:
        record = row.record()
        self.digest.update(json.dumps(record, ensure_ascii=True, sort_keys=True).encode() + b"\n")
        if self._keep_prompts:
            self.prompt_ids.add(record["prompt_id"])
        self._pending.append(record)
        self.rows += 1
        if len(self._pending) == ROW_GROUP:
            self._flush()

    def close(self) -> None:
        if self._writer is not None:
            self._flush()
            self._writer.close()
            self._writer = None

    def _flush(self) -> None:
        if self._pending and self._writer is not None:
            self._writer.write_table(pa.Table.from_pylist(self._pending, schema=ROW_SCHEMA))
        self._pending = []


def read_manifest(folder: Path) -> SnapshotManifest:
    """The manifest of a snapshot. Raises DataError naming the folder."""
    try:
        return SnapshotManifest(**read_json(folder / MANIFEST))
    except (ContractError, TypeError) as error:
        raise DataError(f"{folder}: not a snapshot: {error}", "run the validate stage again") from None


def open_snapshot(folder: Path) -> SnapshotRef:
    """Verify hashes, row counts and schema of a snapshot. Raises DataError naming the file that differs."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        file = folder / f"{name}.parquet"
        if not file.is_file() or sha256_file(file) != expected:
            raise DataError(f"{file}: missing, or not what the manifest says", "run the validate stage again")
        metadata = pq.read_metadata(file)
        if metadata.num_rows != manifest.rows[name] or not pq.read_schema(file).equals(ROW_SCHEMA):
            raise DataError(
                f"{file}: {metadata.num_rows} rows, or another schema than the manifest's", "validate again"
            )
    return SnapshotRef(str(folder), manifest.sha256, manifest.num_rows)


def read_split(folder: Path, split: Split | str) -> pa.Table:
    """One split, memory-mapped. Raises DataError where it is missing."""
    return pq.read_table(_split_file(folder, split), schema=ROW_SCHEMA, memory_map=True)


def iter_split(folder: Path, split: Split | str) -> Iterator[Row]:
    """Rows of one split in order, a row group at a time in memory. Raises DataError where it is missing."""
    with pq.ParquetFile(_split_file(folder, split)) as stream:
        for batch in stream.iter_batches(batch_size=ROW_GROUP):
            for record in batch.to_pylist():
                yield Row.from_record(record)


def read_rows_file(file: Path) -> list[Row]:
    """All rows of one snapshot file, such as the frozen evaluation prompts. Raises DataError naming the file."""
    try:
        table = pq.read_table(file, schema=ROW_SCHEMA)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: not a file of a snapshot: {error}", "give an evaluation.parquet") from None
    if table.num_rows == 0:
        raise DataError(f"{file}: no rows", "give the evaluation.parquet of an earlier snapshot")
    return list(rows_of(table))


def _split_file(folder: Path, split: Split | str) -> Path:
    file = folder / f"{Split(split)}.parquet"
    if not file.is_file():
        raise DataError(f"{file}: missing", "give the folder that the validate stage wrote")
    return file


def _prompt_set_digest(prompt_ids: Sequence[str] | set[str]) -> str:
    return hashlib.sha256("\n".join(sorted(prompt_ids)).encode()).hexdigest()

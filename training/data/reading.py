"""Reading a source as a stream of raw records, each with its file, row number and partition."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from configs.credentials import without_credentials
from training.data.files import read_jsonl, read_parquet
from training.data.reasons import Problem
from training.errors import DataError

PARQUET = (".parquet", ".pq")
JSON_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_READABLE = "parquet, .jsonl or .jsonl.gz"


@dataclass(frozen=True)
class SourceFile:
    """A data file: its place in the file system, its name for people, and the partition it belongs to."""

    path: str
    name: str
    partition: str
    size: int


@dataclass(frozen=True)
class Source:
    """An opened source: the file system and its data files in the order of their partitions."""

    uri: str
    name: str
    filesystem: pafs.FileSystem
    files: tuple[SourceFile, ...]

    def digest(self) -> str:
        """sha256 of the files' names and contents: whether new data has arrived. Reads every byte once.

        Raises DataError naming the file that cannot be read.
        """
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.size}\0".encode())
            with (
                _reaching(f"{without_credentials(self.uri)}: {file.name}"),
                self.filesystem.open_input_stream(file.path, compression=None) as stream,
            ):
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True)
class RawRow:
    """One record as it lies in a file. `values` is None where it cannot be read; `problem` then says why.

    `row` counts from 1: the line of a JSONL file, the row of a parquet file.
    """

    file: str
    row: int
    partition: str
    values: Mapping[str, Any] | None
    problem: Problem | None = None


def open_source(uri: str) -> Source:
    """Find the data files of a file, a folder or a URI. Raises DataError saying what was found instead."""
    filesystem, root = _filesystem(uri)
    shown = without_credentials(uri)
    with _reaching(shown):
        info = filesystem.get_file_info(root)
    if info.type == pafs.FileType.NotFound:
        raise DataError(
            f"data.source {shown}: no such file or folder",
            f"write the path of a {_READABLE} file or of a folder of them, or a URI; "
            "relative paths start at the working folder",
        )
    name = posixpath.basename(root.rstrip("/"))
    if info.type == pafs.FileType.File:
        if not name.lower().endswith(PARQUET + JSON_LINES):
            raise DataError(f"data.source {shown}: not a {_READABLE} file", "convert it, or name another file")
        files: tuple[SourceFile, ...] = (SourceFile(root, name, _stem(name), info.size),)
    else:
        with _reaching(shown):
            files = _files_below(filesystem, root)
        if not files:
            raise DataError(f"data.source {shown}: the folder holds no {_READABLE} file", "put the partitions below it")
    return Source(uri, _stem(name), filesystem, files)


def read_rows(source: Source) -> Iterator[RawRow]:
    """Every record of every file, in order, a batch at a time in memory.

    A line or a text that cannot be read is a RawRow with a problem; a file that cannot be read is a DataError naming
    the file and the row reached.
    """
    for file in source.files:
        yield from read_file(source, file)


def read_file(source: Source, file: SourceFile, only: int | None = None) -> Iterator[RawRow]:
    """The records of one file, or `only` the first ones, without reading much more than those."""
    read = read_parquet if file.path.lower().endswith(PARQUET) else read_jsonl
    for row, values, problem in read(source.filesystem, file.path, file.name, only):
        yield RawRow(file.name, row, file.partition, values, problem)


def source_digest(uri: str) -> str:
    """sha256 of a source's content; see Source.digest."""
    return open_source(uri).digest()


@contextmanager
def _reaching(what: str) -> Iterator[None]:
    """Say in words that `what` (a source, or a file of it) cannot be read: no permission, or a network that broke."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        said = without_credentials(str(error)) or type(error).__name__
        raise DataError(
            f"data.source {what}: cannot be read: {said}",
            "check address, permissions and credentials, and repeat the command",
        ) from None


def _filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    if "://" not in uri:
        return pafs.LocalFileSystem(), Path(uri).expanduser().resolve().as_posix()
    try:
        filesystem, root = pafs.FileSystem.from_uri(uri)
        return filesystem, root
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError):
        return _fsspec(uri)


def _fsspec(uri: str) -> tuple[pafs.FileSystem, str]:
    import fsspec  # only needed for addresses that pyarrow does not know

    try:
        filesystem, root = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError, OSError) as error:
        raise DataError(
            f"data.source {without_credentials(f'{uri}: neither pyarrow nor fsspec can open it: {error}')}",
            "check the scheme (s3://, gs://, file://, ...) and install the fsspec package for it",
        ) from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), root


def _files_below(filesystem: pafs.FileSystem, root: str) -> tuple[SourceFile, ...]:
    found = []
    for info in filesystem.get_file_info(pafs.FileSelector(root, recursive=True)):
        name = posixpath.relpath(info.path, root)
        hidden = any(part.startswith((".", "_")) for part in name.split("/"))
        if info.type == pafs.FileType.File and not hidden and name.lower().endswith(PARQUET + JSON_LINES):
            found.append(SourceFile(info.path, name, _partition(name), info.size))
    return tuple(sorted(found, key=lambda file: (file.partition, file.name)))


def _partition(name: str) -> str:
    """The folder below the source's root (`date=2025-01-01` is 2025-01-01), or the file's own name without endings."""
    folder, _, file = name.rpartition("/")
    return "/".join(part.split("=", 1)[-1] for part in folder.split("/")) if folder else _stem(file)


def _stem(name: str) -> str:
    for ending in sorted(PARQUET + JSON_LINES, key=len, reverse=True):
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return name

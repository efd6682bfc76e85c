"""A quick look at a source before a night: is it there, can it be read, do its columns make rows? Seconds, not hours.

Only the first rows of a few files are read, by the very code that a night reads with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.credentials import without_credentials
from configs.schema.data import DataConfig
from training.data.checks import check_row
from training.data.formats import Shape, choose_shape, normalise
from training.data.reading import RawRow, Source, SourceFile, open_source, read_file
from training.data.reasons import Problem
from training.errors import DataError

FILES, ROWS = 8, 200


@dataclass(frozen=True)
class Look:
    """What was seen. `bad` counts rows that a night would put into quarantine, by reason."""

    files: int
    size: int
    partitions: tuple[str, ...]
    looked_into: int
    shape: str
    columns: tuple[str, ...]
    rows: int
    bad: Counter[str]
    everything: bool

    @property
    def sentence(self) -> str:
        """For a person."""
        spans = self.partitions[0] if len(self.partitions) == 1 else f"{self.partitions[0]} to {self.partitions[-1]}"
        seen = "all of them" if self.everything else f"the first of {self.looked_into} file(s)"
        told = (
            f"{self.files} file(s), {self.size / 1e6:,.1f} MB, partition(s) {spans}; format `{self.shape}`, columns "
            f"{', '.join(self.columns)}; {self.rows} rows read ({seen})"
        )
        if not self.bad:
            return f"{told}, all sound"
        told = f"{told}, {sum(self.bad.values())} of them for quarantine ({self.reasons})"
        if not self.nothing_sound:
            return told
        return f"{told}; note: none of these rows is sound, so that everything depends on the rows not looked at"

    @property
    def nothing_sound(self) -> bool:
        """Whether every row looked at is one for quarantine."""
        return sum(self.bad.values()) == self.rows

    @property
    def reasons(self) -> str:
        """Why rows are bad, the commonest reason first."""
        return ", ".join(f"{count} {reason}" for reason, count in self.bad.most_common())


def look_at(config: DataConfig) -> Look:
    """Look at `config.source`. Raises DataError: not there, unreadable, no rows, wrong columns, or not
    enough sound rows in all. What was not looked at is given the benefit of the doubt: a night reads it."""
    assert config.source is not None
    source = open_source(config.source)
    chosen = _few(source.files)
    heads = [list(read_file(source, file, ROWS)) for file in chosen]
    rows = [row for head in heads for row in head]
    shape = _shape(config, source, rows)
    bad = _bad_rows(rows, shape, config, config.default_source or source.name)
    everything = len(chosen) == len(source.files) and all(len(head) < ROWS for head in heads)
    found = Look(
        files=len(source.files), size=sum(file.size for file in source.files),
        partitions=tuple(sorted({file.partition for file in source.files})), looked_into=len(chosen), shape=shape.NAME,
        columns=tuple(dict.fromkeys(name for row in rows for name in row.values or ())), rows=len(rows), bad=bad,
        everything=everything,
    )  # fmt: skip
    _refuse_nothing_sound(config, found)
    return found


def _few(files: Sequence[SourceFile]) -> list[SourceFile]:
    """At most FILES of them, evenly: the first, the last (tonight's, as a rule), and some between."""
    if len(files) <= FILES:
        return list(files)
    return [files[round(place * (len(files) - 1) / (FILES - 1))] for place in range(FILES)]


def _shape(config: DataConfig, source: Source, rows: Sequence[RawRow]) -> Shape:
    """As a night chooses it: by the first readable rows. Raises DataError."""
    readable = [row.values for row in rows if row.values is not None]
    if not rows:
        raise DataError(
            f"data.source {_shown(config)}: no rows in {len(source.files)} file(s)", "put data there, or name another"
        )
    if not readable:
        reason = next(row.problem.reason for row in rows if row.problem is not None)
        raise DataError(
            f"{rows[0].file}: none of the first {len(rows)} rows can be read ({reason})",
            "write JSON lines (one object a line, UTF-8) or parquet",
        )
    return choose_shape(config, readable[:ROWS], rows[0].file)


def _bad_rows(rows: Sequence[RawRow], shape: Shape, config: DataConfig, default_source: str) -> Counter[str]:
    return Counter(str(problem.reason) for problem in _problems(rows, shape, config, default_source))


def _problems(rows: Sequence[RawRow], shape: Shape, config: DataConfig, default_source: str) -> Iterator[Problem]:
    for row in rows:
        if row.values is None:
            if row.problem is not None:
                yield row.problem
            continue
        try:
            check_row(normalise(row.values, shape, config, row.partition, default_source), config)
        except Problem as problem:
            yield problem


def _refuse_nothing_sound(config: DataConfig, found: Look) -> None:
    bad = sum(found.bad.values())
    if found.everything and found.nothing_sound:
        raise DataError(
            f"data.source {_shown(config)}: none of the {bad} rows looked at is sound ({found.reasons})",
            "look at the file; name its columns under data.columns, or another data.format",
        )
    if found.everything and found.rows - bad < config.min_rows:
        raise DataError(
            f"data.source {_shown(config)}: {found.rows - bad} sound rows in all, and data.min_rows asks for "
            f"{config.min_rows} to train on",
            "bring more data, or lower data.min_rows",
        )


def _shown(config: DataConfig) -> str:
    return without_credentials(config.source or "")

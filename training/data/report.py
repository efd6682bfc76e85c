"""The validation report: what came in, what was refused and why, what went where. JSON, and markdown for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training.contract import read_json, write_json
from training.data.reasons import ADVICE, Reason
from training.errors import ContractError, DataError

JSON_NAME = "report.json"
MARKDOWN_NAME = "report.md"


@dataclass(frozen=True)
class PartitionCount:
    """What became of one partition's rows. read = quarantined + dropped + train + validation + evaluation."""

    partition: str
    read: int = 0
    quarantined: int = 0
    dropped: int = 0
    train: int = 0
    validation: int = 0
    evaluation: int = 0


@dataclass(frozen=True)
class LengthSummary:
    """Characters of one kind of text over the rows that were kept."""

    text: str
    count: int
    mean: float
    median: float
    p95: float
    longest: int


@dataclass(frozen=True)
class ValidationReport:
    """Counts are rows. `quarantined` and `dropped` are by reason; `examples` name one place of each reason."""

    source: str
    shape: str
    rows_read: int
    splits: Mapping[str, int]
    quarantined: Mapping[str, int]
    dropped: Mapping[str, int]
    examples: Mapping[str, str]
    partitions: Sequence[PartitionCount]
    lengths: Sequence[LengthSummary]
    longer_chosen_share: float | None
    warnings: Sequence[str]
    snapshot_sha256: str | None

    @property
    def rows_kept(self) -> int:
        """Rows in the snapshot."""
        return sum(self.splits.values())

    @property
    def rows_quarantined(self) -> int:
        """Bad rows."""
        return sum(self.quarantined.values())

    @property
    def quarantine_share(self) -> float:
        """Bad rows over rows read; 0 for none read."""
        return self.rows_quarantined / self.rows_read if self.rows_read else 0.0

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both forms and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JSON_NAME, asdict(self))
        (folder / MARKDOWN_NAME).write_text(self.markdown(), encoding="utf-8")
        return folder / JSON_NAME, folder / MARKDOWN_NAME

    @classmethod
    def read(cls, path: Path) -> ValidationReport:
        """Read report.json. Raises DataError naming the file."""
        try:
            content: dict[str, Any] = read_json(path)
            content["partitions"] = [PartitionCount(**item) for item in content["partitions"]]
            content["lengths"] = [LengthSummary(**item) for item in content["lengths"]]
            return cls(**content)
        except (ContractError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a validation report: {error}", "run the validate stage again") from None

    def markdown(self) -> str:
        """One page: totals, reasons with advice, partitions, lengths, warnings. No text of any row."""
        lines = [
            "# Data validation",
            "",
            f"Source `{self.source}`, shape `{self.shape}`. {self.rows_read} rows read, {self.rows_kept} kept, "
            f"{self.rows_quarantined} quarantined ({self.quarantine_share:.2%}), "
            f"{sum(self.dropped.values())} left out.",
            f"Snapshot `{self.snapshot_sha256 or 'none'}`: {self.splits.get('train', 0)} training rows, "
            f"{self.splits.get('validation', 0)} validation rows, "
            f"{self.splits.get('evaluation', 0)} evaluation prompts.",
        ]
        lines += _section("Warnings", [f"* {warning}" for warning in self.warnings])
        lines += _section("Quarantined", self._reason_table())
        lines += _section("Left out", _table(("reason", "rows"), self.dropped.items()))
        partitions = (asdict(item).values() for item in self.partitions)
        lines += _section("Partitions", _table(tuple(PartitionCount.__annotations__), partitions))
        lengths = (asdict(item).values() for item in self.lengths)
        lines += _section("Lengths in characters", _table(tuple(LengthSummary.__annotations__), lengths))
        return "\n".join(lines) + "\n"

    def _reason_table(self) -> list[str]:
        rows = (
            (reason, count, self.examples.get(reason, ""), ADVICE[Reason(reason)])
            for reason, count in self.quarantined.items()
        )
        return _table(("reason", "rows", "for example", "what to do"), rows)


def summarise_lengths(lengths: Mapping[str, Sequence[int]]) -> list[LengthSummary]:
    """Summaries of the kinds of text that occur."""
    found = []
    for text, values in lengths.items():
        if values:
            array = np.asarray(values)
            median, p95 = np.percentile(array, [50, 95])
            mean = round(float(array.mean()), 1)
            found.append(LengthSummary(text, len(array), mean, float(median), round(float(p95), 1), int(array.max())))
    return found


def _section(title: str, body: list[str]) -> list[str]:
    return ["", f"## {title}", "", *body] if body else []


def _table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    body = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *body] if body else []

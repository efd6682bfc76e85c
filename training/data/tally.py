"""Counting rows by what became of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from training.data.reasons import Dropped, Reason
from training.data.report import PartitionCount
from training.data.schema import Row
from training.data.splits import Split


@dataclass
class Tally:
    """Rows read, refused and left out: in all by reason, and by partition."""

    read: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    by_partition: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def rows_read(self) -> int:
        """All records met."""
        return self.read.total()

    def count_read(self, partition: str) -> None:
        """A record was met."""
        self.read[partition] += 1

    def count_quarantined(self, reason: Reason, partition: str, place: str) -> None:
        """A record was refused; the first place of each reason is remembered."""
        self.quarantined[str(reason)] += 1
        self.by_partition[partition]["quarantined"] += 1
        self.examples.setdefault(str(reason), place)

    def count_fate(self, fate: Split | Dropped | Reason, partition: str) -> None:
        """A sound row goes into a split or is left out. Quarantined ones were counted when they were refused."""
        if isinstance(fate, Dropped):
            self.dropped[str(fate)] += 1
            self.by_partition[partition]["dropped"] += 1
        elif isinstance(fate, Split):
            self.by_partition[partition][str(fate)] += 1

    def partitions(self) -> list[PartitionCount]:
        """One line a partition, in the order they were read."""
        return [PartitionCount(name, read=count, **self.by_partition[name]) for name, count in self.read.items()]


class Measure:
    """Lengths in characters of the kept rows' texts, and how often the chosen side is the longer one."""

    def __init__(self) -> None:
        self.lengths: dict[str, list[int]] = defaultdict(list)
        self._longer: Counter[bool] = Counter()

    def add(self, row: Row) -> None:
        """Measure a row."""
        self.lengths["prompt"].append(sum(len(turn["content"]) for turn in row.prompt))
        if row.chosen is not None and row.rejected is not None:
            self.lengths["chosen"].append(len(row.chosen))
            self.lengths["rejected"].append(len(row.rejected))
            if len(row.chosen) != len(row.rejected):
                self._longer[len(row.chosen) > len(row.rejected)] += 1
        self.lengths["response"].extend(len(item["text"]) for item in row.responses or ())

    @property
    def longer_chosen_share(self) -> float | None:
        """Share of pairs of unequal length whose chosen side is longer; None without such pairs."""
        return self._longer[True] / self._longer.total() if self._longer else None


def ordered(counts: Counter[str]) -> dict[str, int]:
    """Largest first, ties by name, so that reports are the same every time."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

"""What the soak looks at after every night, and what it adds up. The counts that must stay 0 are `BROKEN`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.finish_late import finish_late
from tasks.last_config import site_of
from tasks.reconcile import reconcile
from tasks.registry import CHAMPION
from tasks.version_tags import NIGHT
from tests.faults.soundness import (
    assert_champion_answers,
    lost_versions,
    processes_below,
    running_runs,
    torn_checkpoints,
)

BROKEN = (
    "wrong promotions", "lost versions", "torn checkpoints", "runs left RUNNING", "acts left open",
    "champions that do not answer", "processes left", "unexpected ends",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """The home as it is. `nights`: version to the night that made it; `lost`: versions whose bytes are not those of
    their upload, or that the journal names and nobody has; `settled`: what reconcile did before the look."""

    champion: str | None
    nights: dict[str, str]
    lost: list[str]
    torn: list[str]
    running: list[str]
    open_acts: int
    answers: bool
    said: str
    processes: list[str]
    settled: list[str]
    torn_lines: int


def look(home: Path, settle: bool) -> dict[str, Any]:
    """Look, after reconciling if `settle`: as the automation does after a bad night, before the next one starts."""
    site = site_of(home)
    settled: list[str] = []
    if settle:
        finish_late(site)
        settled = reconcile(site).settled
    answers, said = True, ""
    try:
        assert_champion_answers(home)
    except Exception as error:
        answers, said = False, f"{type(error).__name__}: {error}"
    found = Look(
        champion=site.registry.alias(CHAMPION),
        nights={version.number: version.tags[NIGHT] for version in site.registry.versions()},
        lost=lost_versions(site),
        torn=torn_checkpoints(home),
        running=running_runs(site),
        open_acts=len(site.journal.unfinished()),
        answers=answers,
        said=said,
        processes=processes_below(home),
        settled=settled,
        torn_lines=site.journal.torn_lines(),
    )
    return asdict(found)


@dataclass
class Counts:
    """The soak's sums. `examples`: the first few of everything that must not be, in words."""

    nights: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    promotions: int = 0
    rollbacks: int = 0
    settled: int = 0
    torn_lines: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def wrong(self, what: str, words: str) -> None:
        """Something that must not be."""
        assert what in BROKEN
        self.broken[what] += 1
        self.examples.append(f"night {self.nights}: {what}: {words}")

    def shown(self) -> Mapping[str, Any]:
        """For JSON."""
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, Counter)}
        counted = {"faults": dict(sorted(self.faults.items())), "ends": dict(sorted(self.ends.items()))}
        return plain | counted | {"broken": {name: self.broken[name] for name in BROKEN}}

    @property
    def sound(self) -> bool:
        """Whether nothing was found that must not be."""
        return not any(self.broken.values())

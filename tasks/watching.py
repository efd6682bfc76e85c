"""Judging the champion after its promotion: a bound broken `patience` times in a row takes it down, once is noise."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema.registry import WatchConfig, WatchLimit
from tasks.append_log import AppendLog
from tasks.journal import Journal
from training.errors import ConfigError

WATCH_LOG = "watch.jsonl"


@dataclass(frozen=True)
class Breach:
    """A bound that was broken, in a sentence. `value` is null when it was not finite."""

    metric: str
    value: float | None
    sentence: str


@dataclass(frozen=True)
class WatchState:
    """Where a champion stands after a measurement: breaches now, how many in a row, and whether patience is used up."""

    version: str
    breaches: tuple[Breach, ...]
    consecutive: int
    patience: int

    @property
    def must_roll_back(self) -> bool:
        """Whether it is time."""
        return self.consecutive >= self.patience

    @property
    def why(self) -> str:
        """The reason of a rollback, for the journal and the version's tag."""
        told = "; ".join(breach.sentence for breach in self.breaches)
        return f"{self.consecutive} measurement(s) in a row broke the limits: {told}"


def breaches(
    measured: Mapping[str, float | None], first: Mapping[str, float | None] | None, limits: Sequence[WatchLimit]
) -> tuple[Breach, ...]:
    """Which limits a measurement breaks. `first`: this champion's first value of each metric, null where this is it.

    A value that is not finite breaks its limit. A metric that was not measured is a mistake of the configuration, not
    of the champion: ConfigError.
    """
    missing = [limit.metric for limit in limits if limit.metric not in measured]
    if missing:
        raise ConfigError(
            f"watch.limits: {', '.join(missing)} is not measured; there is {', '.join(sorted(measured))}",
            "name metrics of the evaluation report",
        )
    found = (_breach(limit, measured[limit.metric], (first or {}).get(limit.metric)) for limit in limits)
    return tuple(breach for breach in found if breach is not None)


def require_limits(config: WatchConfig) -> None:
    """Raises ConfigError when there is nothing to judge by."""
    if not config.limits:
        raise ConfigError(
            "watch.limits is empty: there is nothing to judge",
            "write at least one limit under watch: in the config; it counts when a night has run with it",
        )


def record_watch(
    home: Path, model: str, version: str, measured: Mapping[str, float], config: WatchConfig
) -> WatchState:
    """Judge a measurement of the champion `version`, write it down, and say how many broke the limits in a row.

    Another version, the same one put back by a person, or a measurement within the limits starts the count again.
    """
    require_limits(config)
    log, term = AppendLog(home / WATCH_LOG), _term(home, model)
    earlier = _of_term([r for r in log.read().records if r.get("model") == model], version, term)
    finite = {name: value if math.isfinite(value) else None for name, value in measured.items()}
    now = breaches(finite, _first_values(earlier), config.limits)
    consecutive = 1 + int(earlier[-1]["consecutive"] if earlier else 0) if now else 0
    log.append(
        {
            "model": model,
            "version": version,
            "term": term,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "measured": finite,
            "breaches": [breach.sentence for breach in now],
            "consecutive": consecutive,
        }
    )
    return WatchState(version, now, consecutive, config.patience)


def _term(home: Path, model: str) -> str | None:
    """The act that made the present champion, as the journal knows it; null for one that was made by hand."""
    made = Journal(home).standing(model).last_change
    return made.act if made is not None else None


def _of_term(records: Sequence[Mapping[str, Any]], version: str, term: str | None) -> list[Mapping[str, Any]]:
    """The measurements of this champion's present term: those behind the last one of another version or term."""
    is_other = [r["version"] != version or r.get("term", term) != term for r in records]
    return list(records[len(records) - is_other[::-1].index(True) :] if any(is_other) else records)


def _first_values(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each metric's first finite value: one that began with NaN would otherwise never be held against max_drop."""
    first: dict[str, float] = {}
    for record in records:
        first = {name: value for name, value in record["measured"].items() if value is not None} | first
    return first


def _breach(limit: WatchLimit, value: float | None, first: float | None) -> Breach | None:
    name = limit.metric
    if value is None or not math.isfinite(value):
        return Breach(name, None, f"{name} is not finite")
    if limit.min is not None and value < limit.min:
        return Breach(name, value, f"{name} is {value:.4g}, below {limit.min:g}")
    if limit.max is not None and value > limit.max:
        return Breach(name, value, f"{name} is {value:.4g}, above {limit.max:g}")
    if limit.max_drop is not None and first is not None and value < first - limit.max_drop:
        allowed = f"more than {limit.max_drop:g} below its first value {first:.4g}"
        return Breach(name, value, f"{name} is {value:.4g}, {allowed}")
    return None

"""Metrics and events of a stage, one JSON line each. Loops call `record`; who listens is not their business."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Told = Callable[[int], None]
"""Told now and then how many items are done."""
PARTS = 50


def untold(done: int) -> None:
    """Nobody wants to know."""


def above(told: Told, before: int) -> Told:
    """Counts on from `before`: for work that is done a piece at a time."""
    return lambda done: told(before + done)


class Recorder:
    """Appends to metrics.jsonl.

    A metric line: {"step", "time", key: value, ...}; a non-finite value is written as null and its key listed under
    "nonfinite", never dropped. An event line: {"event", "time", ...}, alike. Progress is an event of kind "progress".
    """

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self.path = path
        self._stream = path.open("ab") if enabled else None

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics. Keys are metric names, values floats in natural units (nats, tokens, ...)."""
        values = {key: float(value) for key, value in metrics.items()}
        nonfinite = sorted(key for key, value in values.items() if not math.isfinite(value))
        line: dict[str, Any] = {"step": step, "time": time.time()}
        line |= {key: value if math.isfinite(value) else None for key, value in values.items()}
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._append(line)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Something worth telling a person: a guard fired, a checkpoint was refused, a round ended early.

        What is not finite is written as null and its place listed under "nonfinite" ("seen.b.1"), as in `record`.
        """
        nonfinite: list[str] = []
        line = {"event": kind, "time": time.time()} | {n: _finite(v, n, nonfinite) for n, v in fields.items()}
        self._append(line | ({"nonfinite": sorted(nonfinite)} if nonfinite else {}))

    def progress(self, step: int, total: int, **shown: float) -> None:
        """How far the stage is, with the few numbers a person wants to see live."""
        finite = {key: value for key, value in shown.items() if math.isfinite(value)}
        self._append({"event": "progress", "time": time.time(), "step": step, "total": total, "shown": finite})

    def counting(self, doing: str, total: int) -> Told:
        """For a phase without steps: a function to be told how many of `total` are done; PARTS lines at the most.

        Such lines carry `doing` ("teacher scores") and say nothing about the length of the stage.
        """
        written = 0

        def told(done: int) -> None:
            nonlocal written
            part = done * PARTS // total if total else PARTS
            if part > written:
                written = part
                self._append(
                    {"event": "progress", "time": time.time(), "step": done, "total": total, "doing": doing}
                )

        if total:
            self._append({"event": "progress", "time": time.time(), "step": 0, "total": total, "doing": doing})
        return told

    def position(self) -> int:
        """Bytes written so far, durable: part of every checkpoint."""
        if self._stream is None:
            return 0
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._stream.tell()

    def rewind(self, position: int) -> None:
        """Forget what was written after `position`: the steps since the checkpoint will be run again."""
        if self._stream is not None:
            self._stream.truncate(position)
            self._stream.seek(position)

    def close(self) -> None:
        """Flush and close."""
        if self._stream is not None:
            self.position()
            self._stream.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._stream is None:
            return
        self._stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._stream.flush()


def _finite(value: Any, place: str, nonfinite: list[str]) -> Any:
    """The value, with null for every number in it that JSON has no word for; their places are added to `nonfinite`."""
    if isinstance(value, Mapping):
        return {key: _finite(item, f"{place}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{place}.{i}", nonfinite) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(place)
        return None
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics.jsonl; a torn last line is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]


def metric_series(path: Path, key: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of one metric, in file order."""
    rows = [line for line in read_lines(path) if "step" in line and "event" not in line and line.get(key) is not None]
    return [row["step"] for row in rows], [row[key] for row in rows]

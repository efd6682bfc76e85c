"""From a stage's metrics.jsonl to its MLflow run: in batches, resumable, bounded, and never a NaN.

The file is the truth, MLflow a copy that may come late. `delivery.json` beside it says how far the copy goes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.metrics_reader import Bookmark, Line, bookmark_at, lines_after
from tasks.mlflow_keys import mlflow_key
from tasks.registry import answering
from tasks.registry_errors import TrackingUnavailable
from tasks.thinning import Point, SeriesState, bucket_width, last_of, offer
from training.contract import METRICS, write_json

if TYPE_CHECKING:
    from mlflow import MlflowClient

STATE = "delivery.json"
_BATCH = 500
_TAG_CHARACTERS = 500
_NOT_METRICS = ("step", "time", "nonfinite")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Destination:
    """The run that receives a stage's metrics, and how many points a metric may have there."""

    client: MlflowClient
    tracking_uri: str
    run_id: str
    max_points: int


@dataclass(frozen=True)
class Delivered:
    """Points sent now; `late` says why MLflow could not be reached (null: it was): nothing is lost, call again."""

    points: int
    late: str | None = None


@dataclass
class _State:
    """What delivery.json holds."""

    run_id: str
    bookmark: Bookmark = field(default_factory=Bookmark)
    series: dict[str, SeriesState] = field(default_factory=dict)
    nonfinite: dict[str, list[int]] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    last_step: int | None = None
    steps_seen: int = 0
    total: int | None = None
    complete: bool = False


@dataclass
class _Parcel:
    """What one delivery sends."""

    points: list[tuple[str, Point]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)


def deliver_metrics(directory: Path, to: Destination, final: bool) -> Delivered:
    """Send what is new in `directory`/metrics.jsonl; `final` when the stage has ended (sends each metric's last point).

    Non-finite values become the tag `nonfinite.<metric>`, events the tag `event.<kind>`. A server that is away makes
    the result `late`, never an exception. A repeated delivery sends nothing twice.
    """
    state = _read_state(directory, to.run_id)
    if state.complete:
        return Delivered(0)
    lines, rewritten = lines_after(directory / METRICS, state.bookmark)
    if rewritten:
        # The series keep what was sent, so that steps run again are not sent again.
        state.bookmark, state.nonfinite, state.events, state.steps_seen = Bookmark(), {}, {}, 0
    parcel, end = _pack(state, lines, to.max_points, final)
    try:
        _send(to, parcel)
    except TrackingUnavailable as error:
        return Delivered(0, late=error.message)
    if lines and end:
        state.bookmark = bookmark_at(directory / METRICS, end)
    state.complete = final
    _write_state(directory, state)
    return Delivered(len(parcel.points))


def is_delivered(directory: Path, run_id: str) -> bool:
    """Whether everything of this stage has reached that run."""
    return _read_state(directory, run_id).complete


def _pack(state: _State, lines: Sequence[Line], cap: int, final: bool) -> tuple[_Parcel, int]:
    parcel, end = _Parcel(), state.bookmark.offset
    width = _width(state, lines, cap, final)
    for line in lines:
        if _must_wait(state, cap, final):
            break
        end = line.end
        if "event" in line.content:
            _take_event(state, line.content, parcel)
        elif isinstance(line.content.get("step"), int):
            _take_metrics(state, line.content, width, cap, parcel)
    if final:
        ended = {name: last_of(series) for name, series in state.series.items()}
        parcel.points += [(name, point) for name, point in ended.items() if point is not None]
    return parcel, end


def _must_wait(state: _State, cap: int, final: bool) -> bool:
    """A stage whose length is unknown gets half of the points at full density; the rest waits for its end."""
    return not final and state.total is None and state.steps_seen >= cap // 2


def _width(state: _State, lines: Sequence[Line], cap: int, final: bool) -> int:
    """Steps a bucket: from the real last step at the end, from the announced total before."""
    steps = [line.content["step"] for line in lines if "event" not in line.content and "step" in line.content]
    if final and steps:
        sent = max((series.sent for series in state.series.values()), default=0)
        return bucket_width(min(steps), max(steps), max(2, cap - 2 - sent))
    _learn_total(state, lines)
    return 1 if state.total is None else bucket_width(0, state.total, cap - 1)


def _learn_total(state: _State, lines: Sequence[Line]) -> None:
    """Believe an announced total only when it counts the same steps as the metrics do."""
    step = state.last_step
    for content in (line.content for line in lines):
        if "event" not in content:
            step = content.get("step", step)
        elif content["event"] != "progress" or "doing" in content:  # a phase around the steps counts other things
            continue
        elif step and abs(content.get("step", -2) - step) <= 1:
            state.total = max(int(content.get("total", 0)), state.total or 0)


def _take_metrics(state: _State, content: dict[str, Any], width: int, cap: int, parcel: _Parcel) -> None:
    step, at = content["step"], int(float(content.get("time", 0)) * 1000)
    state.steps_seen += 0 if step == state.last_step else 1
    state.last_step = step
    for name in content.get("nonfinite", ()):
        seen = state.nonfinite.setdefault(name, [step, 0])
        seen[1] += 1
        parcel.tags[f"nonfinite.{mlflow_key(name)}"] = f"{seen[1]} value(s), first at step {seen[0]}"
    for name, value in content.items():
        if name in _NOT_METRICS or value is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        point = offer(state.series.setdefault(name, SeriesState()), (step, at, float(value)), width, cap)
        if point is not None:
            parcel.points.append((name, point))


def _take_event(state: _State, content: dict[str, Any], parcel: _Parcel) -> None:
    kind = str(content["event"])
    if kind == "progress":
        return
    rule = content.get("rule") or content.get("name")
    key = mlflow_key(f"{kind}.{rule}" if rule else kind)
    state.events[key] = state.events.get(key, 0) + 1
    fields = {name: value for name, value in content.items() if name not in ("event", "time")}
    text = f"{state.events[key]} time(s), last: {json.dumps(fields, ensure_ascii=False)}"
    parcel.tags[f"event.{key}"] = text[:_TAG_CHARACTERS]


def _send(to: Destination, parcel: _Parcel) -> None:
    from mlflow.entities import Metric, RunTag

    metrics = [Metric(mlflow_key(name), value, at, step) for name, (step, at, value) in parcel.points]
    tags = [RunTag(name, value) for name, value in parcel.tags.items()]
    with answering(to.tracking_uri):
        for batch in _batches(metrics):
            to.client.log_batch(to.run_id, metrics=batch)
        for batch in _batches(tags, 50):
            to.client.log_batch(to.run_id, tags=batch)


def _batches(items: list[Any], size: int = _BATCH) -> Iterable[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _read_state(directory: Path, run_id: str) -> _State:
    """The state for this run; a fresh one when the stage was delivered to another run, or never."""
    file = directory / STATE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["run_id"] != run_id:
            return _State(run_id)
        content["bookmark"] = Bookmark(**content["bookmark"])
        content["series"] = {name: _series(found) for name, found in content["series"].items()}
        return _State(**content)
    except FileNotFoundError:
        return _State(run_id)
    except (ValueError, KeyError, TypeError):
        log.warning("%s cannot be read; its metrics are sent again, which changes nothing in MLflow", file)
        return _State(run_id)


def _series(found: dict[str, Any]) -> SeriesState:
    held = found["held"]
    return SeriesState(found["sent"], found["last_step"], (held[0], held[1], held[2]) if held else None)


def _write_state(directory: Path, state: _State) -> None:
    write_json(directory / STATE, asdict(state))

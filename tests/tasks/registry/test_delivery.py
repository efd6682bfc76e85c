"""Metrics arrive once each, bounded, late if need be, and never as a NaN. Against a real MLflow on SQLite."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks.delivery import Destination, deliver_metrics, is_delivered
from tasks.mlflow_client import connect
from tasks.mlflow_keys import mlflow_key
from training.recorder import Recorder

Points = Callable[[str], list[tuple[int, float]]]


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A stage's directory."""
    folder = tmp_path / "stage"
    folder.mkdir()
    return folder


@pytest.fixture
def to(home: Path) -> Destination:
    """A run of a real store, with room for 20 points a metric."""
    uri = f"sqlite:///{home / 'mlflow.db'}"
    client = connect(uri)
    experiment = client.create_experiment("x", (home / "artifacts").as_uri())
    return Destination(client, uri, client.create_run(experiment).info.run_id, 20)


@pytest.fixture
def points(to: Destination) -> Points:
    """What the run has of a metric, in the order of steps."""

    def get(name: str) -> list[tuple[int, float]]:
        return sorted((m.step, m.value) for m in to.client.get_metric_history(to.run_id, name))

    return get


def record(stage: Path, steps: range, total: int | None = None, **values: float) -> None:
    recorder = Recorder(stage / "metrics.jsonl")
    for step in steps:
        recorder.record(step, {"loss": float(step), **values})
        if total is not None:
            recorder.progress(step + 1, total)
    recorder.close()


def test_each_point_arrives_once_over_many_deliveries(stage: Path, to: Destination, points: Points) -> None:
    assert deliver_metrics(stage, to, final=False).points == 0
    for start in range(0, 9, 3):
        record(stage, range(start, start + 3))
        assert deliver_metrics(stage, to, final=False).points == 3
        assert deliver_metrics(stage, to, final=False).points == 0
    assert deliver_metrics(stage, to, final=True).points == 0
    assert points("loss") == [(step, float(step)) for step in range(9)]
    assert is_delivered(stage, to.run_id)


def test_a_repeated_batch_after_a_crash_doubles_nothing(stage: Path, to: Destination, points: Points) -> None:
    record(stage, range(5))
    deliver_metrics(stage, to, final=False)
    (stage / "delivery.json").unlink()  # killed after sending, before writing down how far it came
    record(stage, range(5, 8))
    deliver_metrics(stage, to, final=True)
    assert points("loss") == [(step, float(step)) for step in range(8)]


def test_a_torn_state_file_doubles_nothing(stage: Path, to: Destination, points: Points) -> None:
    record(stage, range(5))
    deliver_metrics(stage, to, final=False)
    (stage / "delivery.json").write_text('{"run_id": "')
    deliver_metrics(stage, to, final=True)
    assert points("loss") == [(step, float(step)) for step in range(5)]


def test_long_series_are_thinned_and_keep_their_last_point(stage: Path, to: Destination, points: Points) -> None:
    record(stage, range(1_000))
    deliver_metrics(stage, to, final=True)
    steps = [step for step, _ in points("loss")]
    assert len(steps) <= 20
    assert len(steps) >= 15
    assert steps[0] == 0
    assert steps[-1] == 999


@pytest.mark.parametrize("total", [1_000, None])
def test_live_deliveries_stay_within_the_bound(
    stage: Path, to: Destination, points: Points, total: int | None
) -> None:
    for start in range(0, 1_000, 50):
        record(stage, range(start, start + 50), total)
        deliver_metrics(stage, to, final=False)
    during = len(points("loss"))
    deliver_metrics(stage, to, final=True)
    steps = [step for step, _ in points("loss")]
    assert 5 <= during <= len(steps) <= 20
    assert steps[-1] == 999
    assert len([step for step in steps if step >= 500]) >= 4


def test_a_total_that_counts_something_else_is_not_believed(stage: Path, to: Destination, points: Points) -> None:
    recorder = Recorder(stage / "metrics.jsonl")
    for step in range(9):
        recorder.record(step, {"loss": 1.0})
        recorder.progress(step * 1_000, 1_000_000)
    recorder.close()
    deliver_metrics(stage, to, final=False)
    assert len(points("loss")) == 9


def test_the_total_of_a_phase_around_the_steps_is_not_believed(stage: Path, to: Destination, points: Points) -> None:
    record(stage, range(9))
    recorder = Recorder(stage / "metrics.jsonl")
    recorder.counting("student scores", 50)(9)
    recorder.close()
    deliver_metrics(stage, to, final=False)
    assert len(points("loss")) == 9, "the next steps are not thinned for a stage of 50"


def test_values_that_are_not_finite_become_tags(stage: Path, to: Destination, points: Points) -> None:
    recorder = Recorder(stage / "metrics.jsonl")
    for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0]):
        recorder.record(step, {"loss": value})
    recorder.close()
    deliver_metrics(stage, to, final=True)
    assert points("loss") == [(0, 1.0), (3, 2.0)]
    assert to.client.get_run(to.run_id).data.tags["nonfinite.loss"] == "2 value(s), first at step 1"


def test_events_of_rules_that_differ_in_a_sign_are_told_apart(stage: Path, to: Destination) -> None:
    recorder = Recorder(stage / "metrics.jsonl")
    for rule in ("response_length > 2.0", "response_length < 2.0", "response_length > 2.0"):
        recorder.event("guard", rule=rule, step=1, action="warn")
    recorder.close()
    deliver_metrics(stage, to, final=True)
    tags = to.client.get_run(to.run_id).data.tags
    assert tags["event.guard.response_length -gt- 2.0"].startswith("2 time(s)")
    assert tags["event.guard.response_length -lt- 2.0"].startswith("1 time(s)")


def test_a_key_says_which_name_it_was() -> None:
    for name in ("kl_ref", "response_length/mean", "a-b c.d", "-", "x-gt"):
        assert mlflow_key(name) == name, "what MLflow takes stays"
    assert mlflow_key("kl_ref >= 0.3") == "kl_ref -gt--eq- 0.3"
    assert mlflow_key("a + b") == "a -plus- b"
    assert mlflow_key("é|") == "-ue9--u7c-"


@given(st.lists(st.text("ab-<>=+_u9é|gtdash", max_size=12), min_size=2, unique=True))
@example(["a>b", "a-gt-b", "a-dash-gt-dash-b", "x>gt-y", "x-gt>y", "-u3e-", ">", "-dash-"])
@example(["n" * 300, "n" * 301, "n" * 200, "n" * 183])
def test_different_names_have_different_keys(names: list[str]) -> None:
    keys = [mlflow_key(name) for name in names]
    assert len(set(keys)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-/ ]{0,200}", key) for key in keys)


def test_events_become_tags_and_progress_does_not(stage: Path, to: Destination) -> None:
    recorder = Recorder(stage / "metrics.jsonl")
    recorder.progress(1, 10)
    for step in (3, 4):
        recorder.event("guard", rule="kl_ref > 0.3", step=step, action="rollback")
    recorder.event("early_stop", step=9)
    recorder.close()
    deliver_metrics(stage, to, final=True)
    tags = to.client.get_run(to.run_id).data.tags
    assert tags["event.guard.kl_ref -gt- 0.3"].startswith("2 time(s), last:")
    assert '"step": 4' in tags["event.guard.kl_ref -gt- 0.3"]
    assert "event.early_stop" in tags
    assert not any("progress" in name for name in tags)


def test_a_stage_that_goes_back_to_its_checkpoint_repeats_nothing(
    stage: Path, to: Destination, points: Points
) -> None:
    record(stage, range(6))
    deliver_metrics(stage, to, final=False)
    recorder = Recorder(stage / "metrics.jsonl")
    lines = (stage / "metrics.jsonl").read_bytes().split(b"\n")
    recorder.rewind(len(b"\n".join(lines[:3])) + 1)
    for step in range(3, 9):
        recorder.record(step, {"loss": step + 0.5})
    recorder.close()
    deliver_metrics(stage, to, final=True)
    assert points("loss") == [*((step, float(step)) for step in range(6)), *((s, s + 0.5) for s in range(6, 9))]


def test_a_torn_last_line_is_delivered_when_it_is_whole(stage: Path, to: Destination, points: Points) -> None:
    record(stage, range(2))
    with (stage / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 2, "time": 5.0, "lo')
    deliver_metrics(stage, to, final=False)
    with (stage / "metrics.jsonl").open("ab") as stream:
        stream.write(b'ss": 7.0}\n')
    deliver_metrics(stage, to, final=False)
    assert points("loss") == [(0, 0.0), (1, 1.0), (2, 7.0)]


def test_a_store_that_is_away_makes_it_late_and_loses_nothing(
    stage: Path, to: Destination, points: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    record(stage, range(3))
    gone = Destination(connect("http://127.0.0.1:9"), "http://127.0.0.1:9", to.run_id, 20)
    late = deliver_metrics(stage, gone, final=True)
    assert late.points == 0
    assert "does not answer" in str(late.late)
    assert not is_delivered(stage, to.run_id)
    assert deliver_metrics(stage, to, final=True).points == 3
    assert points("loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_reused_stage_is_delivered_to_the_new_run_as_well(stage: Path, to: Destination) -> None:
    record(stage, range(3))
    deliver_metrics(stage, to, final=True)
    experiment = to.client.get_run(to.run_id).info.experiment_id
    other = Destination(to.client, to.tracking_uri, to.client.create_run(experiment).info.run_id, 20)
    assert deliver_metrics(stage, other, final=True).points == 3


def test_no_line_of_the_state_holds_a_nan(stage: Path, to: Destination) -> None:
    record(stage, range(30), total=1_000)
    deliver_metrics(stage, to, final=False)
    state = json.loads((stage / "delivery.json").read_text())
    assert state["total"] == 1_000
    shutil.rmtree(stage)
    assert deliver_metrics(stage.parent, to, final=False).points == 0

"""The report on disk: comes back unchanged, is written whole or not at all, and is refused when damaged."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from training.errors import GateError
from training.evaluation.records import nonfinite_places
from training.evaluation.report import (
    Estimate,
    EvaluationReport,
    Interval,
    MetricReport,
    PromptOverlap,
    SampleAnswer,
    read_report,
    write_report,
)


@pytest.fixture
def report(make):
    measured = make.measurement(0.5, champion=-0.0, reference=1e-300)
    sample = SampleAnswer(prompt_id="p1", prompt="2+2?\n", challenger="4 ☺", champion="5", challenger_reward=math.nan)
    parts = {"category=sum": make.measurement(0.4)}
    return make.report(make.metric("reward", measured, parts)).model_copy(
        update={"samples": (sample,), "overlap": PromptOverlap(exact=2, near=3)}
    )


def same(left, right):
    """Equality under which NaN equals itself, as in the JSON."""
    return left.model_dump_json() == right.model_dump_json()


@settings(max_examples=80, deadline=None)
@given(value=st.floats(), reward=st.none() | st.floats())
def test_any_float_comes_back_as_it_was(tmp_path_factory, make, value, reward):
    estimate = make.estimate(value, intervals={0.95: (math.nan, math.nan)})
    measured = make.measurement(0.5).model_copy(update={"challenger": estimate})
    sample = SampleAnswer(prompt_id="p", prompt="q", challenger="a", challenger_reward=reward)
    whole = make.report(make.metric("reward", measured)).model_copy(update={"samples": (sample,)})
    path = tmp_path_factory.mktemp("floats") / "report.json"
    write_report(path, whole)
    again = read_report(path)
    found = again.metrics[0].overall.challenger.value
    # repr tells -0.0 from 0.0, and every float from its neighbours
    assert repr(found) == repr(value)
    assert math.isnan(again.metrics[0].overall.challenger.intervals[0].low)
    assert same(again, whole)
    assert again.digest() == whole.digest()


def test_not_finite_is_written_as_words(report, tmp_path):
    write_report(tmp_path / "report.json", report)
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text)["samples"][0]["challenger_reward"] == "nan"
    assert "NaN" not in text
    assert "Infinity" not in text


def test_nothing_else_may_be_a_word_or_a_truth_value(make):
    for wrong in ("0.5", "NaN", "Infinity", "", True, None, [1.0], 10**400):
        with pytest.raises(ValidationError):
            Interval(confidence=0.95, low=wrong, high=1.0)


def test_places_of_what_is_not_finite(report, make):
    assert list(nonfinite_places(report)) == ["samples.0.challenger_reward is nan"]
    bad = make.metric("kl_ref", make.measurement(0.1), {"length=long": make.measurement(math.inf)})
    places = list(nonfinite_places(make.report(bad)))
    assert "metrics.kl_ref.slices.length=long.measurement.challenger.value is inf" in places


def test_the_digest_is_of_the_content(report):
    assert report.digest() == report.model_copy().digest()
    assert report.digest() != report.model_copy(update={"seed": 2}).digest()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "not valid JSON"),
        (lambda text: "", "not valid JSON"),
        (lambda text: "[]", "not a valid EvaluationReport"),
        (lambda text: text.replace('"night": "night-1"', '"night": "a", "night": "b"'), "a key appears twice"),
        (lambda text: text.replace('"night": "night-1"', '"night": NaN'), "bare NaN"),
        (lambda text: text.replace('"night": "night-1"', '"night": 3'), "night: Input should be a valid string"),
        (lambda text: text.replace('"night"', '"nights"'), "night: Field required"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "schema_version"),
        (lambda text: text.replace('"value": 0.5', '"value": 7.5'), "lies outside its interval"),
        (lambda text: text.replace('"value": 0.5', '"value": "half"'), "value: Input should be a valid number"),
        (lambda text: text.replace("☺", "\udcff"), "not valid JSON"),
        (lambda text: "[" * 100_000, "not valid JSON"),
    ],
)
def test_a_damaged_report_is_refused_in_words(report, tmp_path, damage, reason):
    path = tmp_path / "report.json"
    write_report(path, report)
    text = path.read_text(encoding="utf-8")
    damaged = damage(text)
    assert damaged != text
    path.write_bytes(damaged.encode("utf-8", "surrogateescape"))
    with pytest.raises(GateError, match=reason) as caught:
        read_report(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_missing_report_says_so(tmp_path):
    with pytest.raises(GateError, match="not readable: No such file"):
        read_report(tmp_path / "report.json")


def test_a_failed_write_leaves_the_old_report(report, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_report(path, report)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.contract.os.fsync", full)
    with pytest.raises(GateError, match="No space left on device"):
        write_report(path, report.model_copy(update={"seed": 9}))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda make: make.estimate(0.5, 0.6, 0.4), "upside down"),
        (lambda make: make.estimate(0.7, 0.5, 0.6), "outside its interval"),
        (lambda make: make.estimate(0.5, intervals={0.9: (0.3, 0.7), 0.95: (0.4, 0.8)}), "narrower than the 0.9"),
        (lambda make: make.metric("reward", make.measurement(0.5), {"joke": make.measurement(0.5)}), "pattern"),
        (lambda make: make.report(*[make.metric("kl", make.measurement(0.5))] * 2), "reported twice: kl"),
    ],
)
def test_records_refuse_contradictions(make, build, reason):
    with pytest.raises(ValidationError, match=reason):
        build(make)


def test_levels_and_slices_appear_once(make):
    level = Interval(confidence=0.95, low=0.0, high=1.0)
    with pytest.raises(ValidationError, match="each level once"):
        Estimate(value=0.5, n=2, nonfinite=0, values_digest="", intervals=(level, level))
    part = make.metric("reward", make.measurement(0.5), {"category=sum": make.measurement(0.5)}).slices[0]
    with pytest.raises(ValidationError, match="a slice appears twice"):
        MetricReport(name="reward", overall=make.measurement(0.5), slices=(part, part))


def test_records_do_not_change(report):
    with pytest.raises(ValidationError, match="frozen"):
        report.seed = 2
    with pytest.raises(ValidationError, match="unknown"):
        EvaluationReport.model_validate({**dict(report), "unknown": 1})


def test_lookup(report):
    assert report.metric("reward").slice("category=sum").challenger.value == 0.4
    assert report.metric("missing") is None
    estimate = report.metric("reward").overall.challenger
    assert estimate.interval(0.95) == estimate.interval(0.9) == estimate.intervals[0]
    assert estimate.interval(0.96) is None

"""The validate stage in its frame: spec in, snapshot and facts out; refusals in words; torch never loaded."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.schema import NightConfig
from configs.schema.data import DataConfig
from tasks import validate_stage
from tasks.expectations import ExpectationResult, Outcome, SuiteReport
from tasks.night import Opened, open_night
from tasks.night_source import source_of, source_uri
from tasks.night_state import NightBook
from tasks.validate_stage import run, validate
from training.contract import StageResult, StageSpec, file_ref, valid_result, write_spec
from training.data.quickstart import deliver
from training.data.snapshot import open_snapshot
from training.errors import DataError, StageError
from training.process import run_stage
from training.recorder import read_lines

ROOT = Path(__file__).resolve().parents[2]
DATA = {
    "quickstart": {"partitions": 2, "pairs_per_night": 400},
    "evaluation_fraction": 0.15,
    "validation_fraction": 0.15,
}


@pytest.fixture
def no_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Great Expectations has its own tests; here one expectation that passes stands for it."""
    monkeypatch.setattr(validate_stage, "run_expectations", lambda snapshot, config, docs: _suites(docs, Outcome.PASS))


def _suites(docs: Path, outcome: Outcome, critical: bool = True) -> SuiteReport:
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "index.html").touch()
    return SuiteReport(
        [ExpectationResult("train", "expect_x", "column_y", outcome, critical, 1, 2, "1 of 2 values")], docs
    )


def delivered(folder: Path, nights: int) -> Path:
    """The generator's data of the first `nights` nights."""
    quickstart = DataConfig.model_validate(DATA).quickstart
    assert quickstart is not None
    deliver(folder, nights - 1, quickstart, 7)
    return folder


def stage(home: Path, night: int, **changes: Any) -> StageResult:
    content: dict[str, Any] = {"params": {}, "inputs": {}} | changes
    config = DataConfig.model_validate(content.pop("data", DATA)).model_dump(mode="json")
    directory = home / "runs" / str(night) / "validate"
    write_spec(directory, StageSpec("validate", str(night), str(home), 7, {"data": config}, **content))
    return run_stage(directory, run)


@pytest.mark.usefixtures("no_suites")
def test_outputs_metrics_and_facts(tmp_path: Path) -> None:
    delivered(tmp_path / "quickstart", 1)
    result = stage(tmp_path, 1)
    assert set(result.outputs) == {"snapshot", "quarantine", "report", "report_markdown", "data_docs"}
    snapshot = Path(result.output("snapshot").path)
    assert snapshot.parent == tmp_path / "snapshots"
    assert open_snapshot(snapshot).sha256 == result.facts["snapshot_sha256"]
    assert result.metrics["rows_read"] == 400
    kept = sum(result.metrics[f"rows_{split}"] or 0 for split in ("train", "validation", "evaluation"))
    assert kept == result.facts["num_rows"] == 400 - result.metrics["rows_quarantined"] - result.metrics["rows_dropped"]
    assert result.facts["partitions"] == ["2025-01-01"]
    lines = read_lines(tmp_path / "runs" / "1" / "validate" / "metrics.jsonl")
    assert [line["doing"] for line in lines if line.get("event") == "validating"] == [
        "comparing",
        "writing",
        "expecting",
    ]
    json.dumps(result.facts)


@pytest.mark.usefixtures("no_suites")
def test_nights_add_partitions_until_nothing_new_arrives(tmp_path: Path) -> None:
    digests = []
    for night in (1, 2, 3):
        delivered(tmp_path / "quickstart", night)
        result = stage(tmp_path, night)
        digests.append(result.output("snapshot").sha256)
    assert digests[0] != digests[1] == digests[2]
    assert result.facts["partitions"] == ["2025-01-01", "2025-01-02"]


def night_config(**models: Any) -> NightConfig:
    models = {"base": "quickstart", "max_prompt_length": 64, "max_response_length": 64} | models
    gates = {"rules": [{"metric": "reward", "min": 0.0}]}
    return NightConfig.model_validate({"data": DATA, "models": models, "gates": gates, "seed": 7})


@pytest.mark.usefixtures("no_suites")
def test_a_failed_night_does_not_use_up_the_second_partition(tmp_path: Path) -> None:
    """Failed, tried again under a changed config, then a third start: it still finds a night's worth of new data."""
    book = NightBook(tmp_path)

    def partitions_of_next_night(config: NightConfig, status: str) -> list[str]:
        source = source_of(config, tmp_path)
        opened = open_night(book, config, source)
        assert isinstance(opened, Opened), opened
        params = {"source": source_uri(config, tmp_path), "night_index": opened.state.index}
        done = stage(tmp_path, opened.state.index, params=params)
        assert source.fingerprint() == opened.state.fingerprint, "the stage reads what the night was opened with"
        book.change(opened.state, status=status)
        return done.facts["partitions"]

    assert partitions_of_next_night(night_config(), "failed") == ["2025-01-01"]
    changed = night_config(max_response_length=65)
    assert partitions_of_next_night(changed, "finished") == ["2025-01-01"]
    assert partitions_of_next_night(changed, "finished") == ["2025-01-01", "2025-01-02"]


@pytest.mark.usefixtures("no_suites")
def test_source_param_and_frozen_evaluation_are_used(tmp_path: Path) -> None:
    params = {"source": str(delivered(tmp_path / "elsewhere", 1))}
    first = stage(tmp_path, 1, params=params)
    frozen = file_ref(Path(first.output("snapshot").path) / "evaluation.parquet")
    delivered(tmp_path / "elsewhere", 2)
    second = stage(tmp_path, 2, params=params, inputs={"frozen_evaluation": frozen})
    assert second.facts["evaluation_sha256"] == first.facts["evaluation_sha256"]
    assert second.facts["splits"]["evaluation"] == first.facts["splits"]["evaluation"]
    third = stage(tmp_path, 3, params=params, data={"source": "unused"} | _shares())
    assert third.facts["snapshot_sha256"] not in (first.facts["snapshot_sha256"],)


def _shares() -> dict[str, Any]:
    return {key: value for key, value in DATA.items() if key != "quickstart"}


@pytest.mark.usefixtures("no_suites")
def test_a_second_run_of_a_done_stage_works_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delivered(tmp_path / "quickstart", 1)
    first = stage(tmp_path, 1)
    monkeypatch.setattr(validate_stage, "validate", lambda *given, **named: pytest.fail("ran again"))
    assert stage(tmp_path, 1) == first


def test_critical_failures_are_data_errors_and_warnings_are_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig.model_validate(DATA)
    delivered(tmp_path / "quickstart", 1)

    def with_suites(outcome: Outcome, critical: bool) -> validate_stage.Validated:
        monkeypatch.setattr(validate_stage, "run_expectations", lambda s, c, docs: _suites(docs, outcome, critical))
        return validate(config, tmp_path / "out", seed=7, home=tmp_path)

    with pytest.raises(DataError, match="train: expect_x of column_y: 1 of 2 values") as caught:
        with_suites(Outcome.FAIL, True)
    assert "index.html" in str(caught.value.hint)
    assert "train: expect_x of column_y: 1 of 2 values" in with_suites(Outcome.FAIL, False).facts()["warnings"]
    with pytest.raises(StageError, match="could not be judged"):
        with_suites(Outcome.ERROR, False)
    monkeypatch.setattr(validate_stage, "run_expectations", lambda s, c, docs: SuiteReport([], docs))
    with pytest.raises(StageError, match="no expectation was evaluated"):
        validate(config, tmp_path / "out", seed=7, home=tmp_path)


def test_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(validate_stage, "ingest", full)
    with pytest.raises(StageError, match="no space left while validating") as caught:
        validate(DataConfig.model_validate(DATA), tmp_path / "out", seed=7, home=tmp_path)
    assert "free space" in str(caught.value.hint)


def test_bad_data_leaves_report_and_quarantine(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "q", "chosen": "", "rejected": "b"}\n' * 30)
    with pytest.raises(DataError, match="all 30 rows were refused: empty_answer"):
        stage(tmp_path, 1, data={"source": str(tmp_path / "data.jsonl")})
    directory = tmp_path / "runs" / "1" / "validate"
    assert (directory / "validation" / "quarantine.parquet").exists()
    assert (directory / "validation" / "report.md").exists()
    assert not (directory / "result.json").exists()


def test_whole_stage_in_a_process_of_its_own_without_torch(tmp_path: Path) -> None:
    directory = tmp_path / "stage"
    delivered(tmp_path / "quickstart", 1)
    config = DataConfig.model_validate(DATA).model_dump(mode="json")
    spec = StageSpec("validate", "1", str(tmp_path), 7, {"data": config})
    write_spec(directory, spec)
    program = (
        "import sys; from pathlib import Path; from tasks.validate_stage import run\n"
        "from training.process import run_stage; run_stage(Path(sys.argv[1]), run)\n"
        "assert not {'torch', 'transformers', 'prefect', 'mlflow'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(directory)], cwd=ROOT, check=True, timeout=120)
    result = valid_result(directory, spec.key)
    assert result is not None
    assert result.facts["expectations"] > 40
    assert (Path(result.output("data_docs").path) / "index.html").exists()


def test_importing_the_stage_needs_no_great_expectations() -> None:
    program = (
        "import sys, tasks.validate_stage, training.data.quickstart; assert 'great_expectations' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)

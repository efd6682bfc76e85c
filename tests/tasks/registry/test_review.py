"""The pictures, the table of answers and the note, from files, into a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.mlflow_client import connect
from tasks.night_page import NOTE_CHARACTERS, fit_note
from tasks.review import ReviewFiles, answers_table, night_figures
from tasks.run_tags import NOTE
from tasks.site import Site
from tasks.tracking import NightRun, _State
from training.evaluation.report_records import SampleAnswer
from training.recorder import Recorder

SAMPLES = [
    SampleAnswer(prompt_id="a", prompt="1+1?", challenger="2", reference="3", challenger_reward=1.0),
    SampleAnswer(prompt_id="b", prompt="2+2?", challenger="4", reference="5", challenger_reward=0.5),
]


@pytest.fixture
def files(tmp_path: Path) -> ReviewFiles:
    """Everything a review can be made of."""
    recorder = Recorder(tmp_path / "metrics.jsonl")
    for step in range(40):
        recorder.record(step, {"reward_mean": 0.1 * step, "kl_ref_offpolicy": 0.01 * step})
        if step % 10 == 0:
            recorder.record(step, {"kl_ref": float("nan") if step == 10 else 0.01 * step, "heldout_reward": 0.2})
    recorder.close()
    bins = [{"share": 0.5, "confidence": 0.6, "hit_rate": 0.55}, {"share": 0.5, "confidence": 0.9, "hit_rate": 0.95}]
    (tmp_path / "calibration.json").write_text(json.dumps({"bins": bins}))
    columns = {
        "prompt": ["p"] * 6,
        "reference_tokens": [3] * 6,
        "challenger_tokens": [2, 2, 2, 2, 2, 30],
        "challenger_reward": [0.1, 0.2, 0.3, 0.4, 0.5, None],
        "challenger_gold_reward": [0.0, 0.1, 0.5, 0.4, 0.2, 0.9],
    }
    pq.write_table(pa.table(columns), tmp_path / "answers.parquet")
    return ReviewFiles(tmp_path / "metrics.jsonl", tmp_path / "calibration.json", tmp_path / "answers.parquet", 0.3)


def test_every_picture_for_which_there_are_numbers(files: ReviewFiles, tmp_path: Path) -> None:
    figures = night_figures(files)
    assert set(figures) == {"reward_and_kl.png", "calibration.png", "answer_lengths.png", "gold_against_proxy.png"}
    above, below = figures["reward_and_kl.png"].axes
    assert [line.get_label() for line in above.lines] == ["reward_mean", "heldout_reward"]
    assert {"kl_ref", "kl_ref_offpolicy", "guard at 0.3"} == {line.get_label() for line in below.lines}
    assert len(below.lines[0].get_xdata()) == 3
    for name, figure in figures.items():
        figure.savefig(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_nothing_there_is_no_picture(tmp_path: Path) -> None:
    assert night_figures(ReviewFiles()) == {}
    absent = ReviewFiles(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert night_figures(absent) == {}


def test_drawing_leaves_pyplot_alone(files: ReviewFiles) -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    before = matplotlib.get_backend()
    night_figures(files)
    assert plt.get_fignums() == []
    assert matplotlib.get_backend() == before


def test_answers_old_beside_new_without_empty_models() -> None:
    columns = answers_table(SAMPLES)
    assert list(columns) == ["prompt", "reference", "challenger", "reference_reward", "challenger_reward"]
    assert columns["challenger"] == ["2", "4"]


def test_the_champion_stands_beside_the_challenger_and_rewards_come_after() -> None:
    columns = answers_table([sample.model_copy(update={"champion": "7"}) for sample in SAMPLES])
    answers, rewards = ["champion", "challenger", "reference"], ["champion_reward", "challenger_reward"]
    assert list(columns) == ["prompt", *answers, *rewards, "reference_reward"]
    assert columns["champion"] == ["7", "7"]


def test_review_arrives_in_mlflow_once(site: Site, experiment: str, files: ReviewFiles) -> None:
    client = connect(site.tracking_uri)
    night = NightRun(site, "n1", _State(experiment, client.create_run(experiment).info.run_id))
    for _ in range(2):
        night.log_figures(night_figures(files))
        night.log_answers(answers_table(SAMPLES))
        night.note("# Promote\n\nAll rules hold.\n", "summary/summary.md")
    stored = client.download_artifacts(night.run_id, "answers.json")
    table = json.loads(Path(stored).read_text())
    assert len(table["data"]) == 2
    assert table["columns"][:3] == ["prompt", "reference", "challenger"], "old beside new also in MLflow"
    assert list(night.pictures()) == ["reward and kl", "gold against proxy", "answer lengths", "calibration"]
    assert {f.path for f in client.list_artifacts(night.run_id, "figures")} == {
        f"figures/{name}" for name in night_figures(files)
    }
    assert client.get_run(night.run_id).data.tags[NOTE].startswith("# Promote")


def test_a_long_note_is_cut_between_lines_and_says_where_the_rest_is(site: Site, experiment: str) -> None:
    client = connect(site.tracking_uri)
    night = NightRun(site, "n1", _State(experiment, client.create_run(experiment).info.run_id))
    page = "# Page\n\n" + "\n".join(f"- sentence {number} of the gate" for number in range(1_000))
    night.note(page, "summary/summary.md")
    note = client.get_run(night.run_id).data.tags[NOTE]
    assert len(note) <= 8_000
    assert note.endswith("`summary/summary.md`.*\n")
    assert Path(client.download_artifacts(night.run_id, "summary/summary.md")).read_text() == page


def test_a_table_is_not_cut_down_to_its_head() -> None:
    page = "text\n\n## Numbers\n\n| a | b |\n| --- | --- |\n" + "| " + "x" * 400 + " | y |\n"
    assert "---" not in fit_note(page, "w", limit=160)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(alphabet="ab|# -", max_size=60), max_size=60), st.integers(150, 900))
def test_a_note_is_never_longer_than_its_limit(lines: list[str], limit: int) -> None:
    page = "\n".join(lines)
    note = fit_note(page, "summary.md", limit)
    assert len(note) <= limit
    assert note == page or note.endswith("`summary.md`.*\n")
    assert NOTE_CHARACTERS < 8_000

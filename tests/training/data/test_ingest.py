"""From files to a snapshot: what is kept, refused, left out, and the words of every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from configs.schema.data import DataConfig
from training.data.ingest import Ingested, ingest
from training.data.report import ValidationReport
from training.data.snapshot import iter_split, read_manifest
from training.data.splits import Split, side_of
from training.errors import DataError

TOPICS = ("bees", "rivers", "clocks", "bread", "maps", "moths", "tides", "ovens", "violins", "snow")


def pair(number: int, answer: str = "") -> dict[str, Any]:
    topic = TOPICS[number % 10]
    return {
        "prompt": f"Tell me fact number {number} about {topic} in room {number * 7}",
        "chosen": f"{answer}Fact {number} about {topic} is that they are {number * 13} years old.",
        "rejected": f"I forgot all {number} of them.",
        "category": topic,
    }


def write(folder: Path, rows: list[Any], name: str = "2025-01-01.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return folder


def config(source: Path, **content: Any) -> DataConfig:
    settings = {"source": str(source), "evaluation_fraction": 0.15, "validation_fraction": 0.15, "max_quarantine": 0.5}
    return DataConfig.model_validate(settings | content)


def run(tmp_path: Path, rows: list[Any], **content: Any) -> Ingested:
    return ingest(config(write(tmp_path / "data", rows), **content), tmp_path / "out", seed=0)


def splits(done: Ingested) -> dict[str, list[str]]:
    folder = Path(done.snapshot.uri)
    return {split: [row.prompt[0]["content"] for row in iter_split(folder, split)] for split in Split}


GOOD = [pair(number) for number in range(100)]


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    twin = pair(3) | {"chosen": pair(3)["rejected"], "rejected": pair(3)["chosen"]}
    bad = [
        b'{"prompt": ',
        pair(500) | {"chosen": ""},
        pair(501) | {"rejected": pair(501)["chosen"]},
        pair(502) | {"chosen": "\0"},
    ]
    done = run(tmp_path, [*GOOD, *bad, twin, pair(4)])
    report = done.report
    assert report.rows_read == 106
    assert dict(report.quarantined) == {
        "contradicting_labels": 2,
        "empty_answer": 1,
        "identical_sides": 1,
        "nul_byte": 1,
        "unreadable_json": 1,
    }
    assert dict(report.dropped) == {"exact_duplicate": 1}
    assert report.rows_kept + report.rows_quarantined + sum(report.dropped.values()) == report.rows_read
    count = report.partitions[0]
    assert (count.partition, count.read, count.quarantined, count.dropped) == ("2025-01-01", 106, 6, 1)
    assert count.train + count.validation + count.evaluation == report.rows_kept == done.snapshot.num_rows
    assert ValidationReport.read(done.report_json) == report


def test_left_out_rows_stand_in_quarantine_with_their_reason_and_count_not_as_refused(tmp_path: Path) -> None:
    near = pair(5) | {"prompt": pair(5)["prompt"] + "!", "chosen": pair(5)["chosen"] + " Indeed."}
    first = run(tmp_path / "first", GOOD, near_duplicate_threshold=None)
    held = splits(first)["evaluation"][0]
    # Only training rows are left out for being like an evaluation prompt.
    likes = (pair(900) | {"prompt": held + "?" * marks} for marks in range(1, 100))
    overlap = next(row for row in likes if _side(row) is Split.TRAIN)
    again = ingest(
        config(write(tmp_path / "data", [*GOOD, pair(4), near, overlap]), max_quarantine=0.0, max_rows=40),
        tmp_path / "out",
        seed=0,
        frozen_evaluation=Path(first.snapshot.uri) / "evaluation.parquet",
    )
    rows = {row["row"]: row for row in pq.read_table(again.quarantine).to_pylist()}
    assert rows[101]["reason"] == "exact_duplicate"
    assert rows[102]["reason"] == "near_duplicate"
    assert rows[103]["reason"] == "evaluation_overlap_near"
    assert all("not counted" in row["detail"] for row in rows.values())
    assert json.loads(rows[101]["content"])["chosen"] == pair(4)["chosen"]
    counted = {name: count for name, count in again.report.dropped.items() if name != "over_max_rows"}
    assert again.report.dropped["over_max_rows"] > 0
    assert sum(counted.values()) == len(rows)
    assert again.report.rows_quarantined == 0


def test_quarantine_keeps_content_file_row_and_reason(tmp_path: Path) -> None:
    half = b'{"prompt": "q\\ud800", "chosen": "a", "rejected": "b"}'
    done = run(tmp_path, [*GOOD, half, b"[]"])
    rows = pq.read_table(done.quarantine).to_pylist()
    assert [(row["file"], row["row"], row["reason"]) for row in rows] == [
        ("2025-01-01.jsonl", 101, "lone_surrogate"),
        ("2025-01-01.jsonl", 102, "not_an_object"),
    ]
    assert json.loads(rows[0]["content"])["prompt"] == "q\ud800"
    assert rows[1]["content"] is None


def test_no_prompt_is_on_two_sides_and_none_in_evaluation_is_trained_on(tmp_path: Path) -> None:
    done = run(tmp_path, [*GOOD, *(pair(number, "Well. ") for number in range(100))])
    sides = {name: set(prompts) for name, prompts in splits(done).items()}
    assert not sides["train"] & (sides["validation"] | sides["evaluation"])
    evaluation = splits(done)["evaluation"]
    assert len(evaluation) == len(set(evaluation)) > 5
    # The second pair of an evaluation prompt is held out as well.
    assert set(evaluation) <= sides["validation"] | sides["evaluation"]


def test_evaluation_is_capped_by_the_oldest_prompts_and_stays_when_nights_are_added(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", GOOD)
    settings = config(folder, evaluation_prompts=8)
    first = ingest(settings, tmp_path / "1", seed=0)
    write(folder, [pair(number) for number in range(200, 300)], "2025-01-02.jsonl")
    second = ingest(settings, tmp_path / "2", seed=0)
    assert len(splits(first)["evaluation"]) == 8
    # Prompts of the evaluation side beyond the cap are held out too: whatever the cap, they are not trained on.
    assert {_side({"prompt": prompt}) for prompt in splits(first)["train"]} == {Split.TRAIN}
    surplus = [prompt for prompt in splits(first)["validation"] if _side({"prompt": prompt}) is Split.EVALUATION]
    assert surplus
    assert splits(second)["evaluation"] == splits(first)["evaluation"]
    manifests = [read_manifest(Path(done.snapshot.uri)) for done in (first, second)]
    assert manifests[0].evaluation_sha256 == manifests[1].evaluation_sha256
    assert manifests[0].sha256 != manifests[1].sha256
    assert set(splits(first)["train"]) <= set(splits(second)["train"])


def test_frozen_evaluation_survives_the_loss_of_old_partitions_and_a_new_salt(tmp_path: Path) -> None:
    first = run(tmp_path, GOOD)
    frozen = Path(first.snapshot.uri) / "evaluation.parquet"
    held = splits(first)["evaluation"]
    folder = write(tmp_path / "later", [*GOOD[50:], *(pair(number, "Well. ") for number in range(150))])
    later = ingest(config(folder, split_salt="new"), tmp_path / "out2", seed=0, frozen_evaluation=frozen)
    assert splits(later)["evaluation"] == held
    assert not set(held) & set(splits(later)["train"])
    assert later.report.dropped["evaluation_overlap"] > 0
    again = ingest(config(tmp_path / "data"), tmp_path / "out3", seed=0, frozen_evaluation=frozen)
    assert again.snapshot.sha256 == first.snapshot.sha256


def test_near_copies_of_evaluation_prompts_leave_training(tmp_path: Path) -> None:
    long = "Please explain in plain words and without any jargon how the tides of the northern sea come about on day "
    rows = [pair(number) | {"prompt": long + f"{number} of the year"} for number in range(40)]
    settings = {"near_duplicate_threshold": 0.6}
    done = run(tmp_path, [*GOOD, *rows], **settings)
    sides = {side_of(row["prompt_id"], config(tmp_path)) for row in _records(done)}
    assert sides == set(Split)
    assert done.report.dropped["evaluation_overlap_near"] > 10
    assert not [prompt for prompt in splits(done)["train"] if prompt.startswith("Please explain")]
    assert "nearly an evaluation prompt" in done.report_markdown.read_text()
    off = run(tmp_path, [*GOOD, *rows], near_duplicate_threshold=None)
    assert not off.report.dropped


def _records(done: Ingested) -> list[dict[str, Any]]:
    return [row for split in Split for row in pq.read_table(Path(done.snapshot.uri) / f"{split}.parquet").to_pylist()]


def test_near_duplicate_pairs_are_left_out_and_counted(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(60))
    base = {"prompt": words, "chosen": f"yes {words}", "rejected": f"no {words}"}
    copy = {"prompt": words + " indeed", "chosen": f"yes {words}!", "rejected": f"no {words}."}
    other = copy | {"rejected": "something else entirely, and much shorter"}
    done = run(tmp_path, [*GOOD, base, copy, other])
    assert dict(done.report.dropped) == {"near_duplicate": 1}


def test_caps_are_seeded_and_leave_evaluation_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", GOOD)
    settings = config(folder, max_rows=20, max_validation_rows=5)
    runs = [ingest(settings, tmp_path / str(place), seed=seed) for place, seed in enumerate((1, 1, 2))]
    assert [len(splits(done)["train"]) for done in runs] == [20, 20, 20]
    assert [len(splits(done)["validation"]) for done in runs] == [5, 5, 5]
    assert runs[0].snapshot.sha256 == runs[1].snapshot.sha256 != runs[2].snapshot.sha256
    assert splits(runs[0])["evaluation"] == splits(runs[2])["evaluation"]
    assert runs[0].report.dropped["over_max_rows"] == 100 - 25 - len(splits(runs[0])["evaluation"])


def test_report_page_has_no_text_of_any_row(tmp_path: Path) -> None:
    done = run(tmp_path, [*GOOD, pair(500) | {"chosen": "secret\0secret"}])
    page = done.report_markdown.read_text() + done.report_json.read_text()
    assert "secret" not in page
    assert "fact number" not in page
    for part in (
        "## Warnings",
        "## Quarantined",
        "2025-01-01.jsonl row 101",
        "remove NUL bytes",
        "## Partitions",
        "| chosen |",
    ):
        assert part in page


def test_length_bias_and_few_prompts_are_warned_about(tmp_path: Path) -> None:
    done = run(tmp_path, GOOD)
    assert done.report.longer_chosen_share == 1.0
    assert any("longer one in 100%" in warning for warning in done.report.warnings)
    assert any("evaluation prompts: intervals will be wide" in warning for warning in done.report.warnings)


def refusal(tmp_path: Path, rows: list[Any], **content: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        run(tmp_path, rows, **content)
    assert not list((tmp_path / "out").glob("snapshots/*"))
    assert not list((tmp_path / "out").glob(".spool*"))
    return caught.value


def test_too_many_bad_rows_name_the_top_reasons_and_the_quarantine(tmp_path: Path) -> None:
    error = refusal(tmp_path, [*GOOD, *([pair(500) | {"chosen": ""}] * 9), b"{"], max_quarantine=0.05)
    assert "10 of 110 rows (9.1%) were refused, more than data.max_quarantine 5.0%" in error.message
    assert "empty_answer (9, e.g. 2025-01-01.jsonl row 101), unreadable_json (1" in error.message
    assert str(tmp_path / "out" / "quarantine.parquet") in str(error.hint)
    assert pq.read_metadata(tmp_path / "out" / "quarantine.parquet").num_rows == 10
    assert ValidationReport.read(tmp_path / "out" / "report.json").snapshot_sha256 is None


def test_a_share_just_at_the_limit_passes(tmp_path: Path) -> None:
    assert run(tmp_path, [*GOOD[:95], *([b"{"] * 5)], max_quarantine=0.05).report.rows_quarantined == 5


def test_contradictions_count_against_the_limit(tmp_path: Path) -> None:
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in GOOD[:10]]
    error = refusal(tmp_path, [*GOOD, *turned], max_quarantine=0.1)
    assert "contradicting_labels (20" in error.message


def test_all_rows_refused_even_if_any_share_is_allowed(tmp_path: Path) -> None:
    error = refusal(tmp_path, [row | {"chosen": "  "} for row in GOOD], max_quarantine=1.0)
    assert error.message.startswith("all 100 rows were refused: empty_answer (100")
    assert "remove rows in which an answer is empty" in str(error.hint)


def test_empty_file_empty_parquet_and_unreadable_lines(tmp_path: Path) -> None:
    assert "no rows in 1 file" in refusal(tmp_path, [b""]).message
    assert "none of the first 2 rows" in refusal(tmp_path, [b"prompt,chosen", b"a,b"]).message


def test_wrong_columns(tmp_path: Path) -> None:
    error = refusal(tmp_path, [{"question": "q", "answer": "a"}])
    assert "columns found: answer, question" in error.message
    assert "data.columns" in str(error.hint)


def test_too_few_rows_and_empty_sides(tmp_path: Path) -> None:
    train = len([row for row in GOOD if _side(row) is Split.TRAIN])
    error = refusal(tmp_path, GOOD, min_rows=train + 1)
    assert f"{train} training rows are left, fewer than data.min_rows {train + 1}" in error.message
    few = [row for row in GOOD if _side(row) is Split.TRAIN][:20]
    assert "raise data.evaluation_fraction" in str(refusal(tmp_path, few).hint)
    held_out = [row for row in GOOD if _side(row) is Split.EVALUATION][:3]
    assert "raise data.validation_fraction" in str(refusal(tmp_path, [*few, *held_out]).hint)
    done = ingest(config(tmp_path / "data", validation_fraction=0), tmp_path / "out", seed=0)
    assert done.report.splits["validation"] == 0


def _side(row: dict[str, Any]) -> Split:
    from training.data.schema import Message, prompt_id

    return side_of(prompt_id([Message(role="user", content=row["prompt"])]), config(Path("x")))


def test_missing_source_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        ingest(config(tmp_path / "none"), tmp_path / "out", seed=0)
    assert not (tmp_path / "out").exists()


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    folder = write(tmp_path / "data", [pair(number) for number in range(2500)])
    ingest(config(folder), tmp_path / "out", seed=0, progress=lambda doing, rows: told.append((doing, rows)))
    assert told == [("reading", 2000), ("comparing", 2500), ("writing", 2500)]

"""The quick look at a source: what it sees, what it refuses, and that it reads little."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema.data import DataConfig
from training.data.look import FILES, ROWS, look_at
from training.errors import DataError

PAIR = {"prompt": "How much is 2 plus 3?", "chosen": "It is 5.", "rejected": "It is 6."}
TALK = [{"role": "user", "content": "Hello?"}]
SHAPES = {
    "pairs": PAIR,
    "chat": {"prompt": TALK, "chosen": "Hello.", "rejected": "Go away."},
    "hh": {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello.", "rejected": "\n\nHuman: Hi\n\nAssistant: What?"},
    "responses": {"prompt": "How much?", "responses": [{"text": "5", "reward": 1.0}, {"text": "6", "reward": 0.0}]},
}


def numbered(row: dict, count: int = 20) -> list[dict]:
    return [row | {"prompt": f"{row['prompt']} ({i})"} if isinstance(row.get("prompt"), str) else row
            for i in range(count)]  # fmt: skip


def write(file: Path, rows: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
        return file
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def config_of(source: Path, **changes) -> DataConfig:
    return DataConfig(source=str(source), **changes)


def refusal(source: Path, **changes) -> str:
    with pytest.raises(DataError) as refused:
        look_at(config_of(source, **changes))
    assert "what to do" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_every_shape_in_every_kind_of_file(tmp_path: Path, shape: str, name: str) -> None:
    found = look_at(config_of(write(tmp_path / name, numbered(SHAPES[shape]))))
    assert (found.shape, found.files, found.rows, found.everything) == (shape, 1, 20, True)
    assert found.columns == tuple(SHAPES[shape])
    assert f"format `{shape}`" in found.sentence
    assert "20 rows read (all of them), all sound" in found.sentence


def test_partitions_are_looked_into_from_the_first_to_the_last(tmp_path: Path) -> None:
    for day in range(1, 31):
        write(tmp_path / f"date=2025-01-{day:02d}" / "rows.jsonl", numbered(PAIR, ROWS + 50))
    found = look_at(config_of(tmp_path))
    assert (found.files, found.looked_into, found.rows) == (30, FILES, FILES * ROWS)
    assert "partition(s) 2025-01-01 to 2025-01-30" in found.sentence
    write(tmp_path / "date=2025-01-30" / "rows.jsonl", [{"other": 1}] * 5)
    assert look_at(config_of(tmp_path)).bad == {"missing_value": 5}, "the newest partition is among those looked into"


def test_bad_rows_are_counted_with_their_reasons(tmp_path: Path) -> None:
    rows = [*numbered(PAIR), PAIR | {"chosen": "It is 6."}, PAIR | {"prompt": "  "}, PAIR | {"chosen": None}]
    found = look_at(config_of(write(tmp_path / "rows.jsonl", rows)))
    assert found.bad == {"identical_sides": 1, "empty_prompt": 1, "missing_value": 1}
    assert "3 of them for quarantine" in found.sentence


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"question": "q", "better": "a", "worse": "b"}], "none of the known shapes fits the columns found: better"),
        ([PAIR | {"chosen": "", "rejected": ""}] * 20, "none of the 20 rows looked at is sound (20 empty_answer)"),
        ([PAIR] * 3, "3 sound rows in all, and data.min_rows asks for 16"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_that_no_night_could_use(tmp_path: Path, rows: list[dict], words: str, name: str) -> None:
    assert words in refusal(write(tmp_path / name, rows))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_bad_rows_at_the_head_of_a_sound_file_are_told_and_refuse_nothing(tmp_path: Path, name: str) -> None:
    """One in a hundred is bad, which a night puts into quarantine: they only happen to come first."""
    head = [PAIR | {"chosen": "", "rejected": ""}] * ROWS
    found = look_at(config_of(write(tmp_path / name, head + numbered(PAIR, 20_000))))
    assert (found.rows, found.everything, found.nothing_sound) == (ROWS, False, True)
    assert f"{ROWS} of them for quarantine" in found.sentence
    assert "note: none of these rows is sound" in found.sentence


def test_columns_named_in_the_config(tmp_path: Path) -> None:
    rows = [{"question": f"q {i}", "better": "a", "worse": "b"} for i in range(20)]
    file = write(tmp_path / "rows.parquet", rows)
    named = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    assert look_at(config_of(file, columns=named)).shape == "pairs"
    told = refusal(file, columns=named | {"chosen": "bettr"}, format="pairs")
    assert "no column 'bettr'" in told
    assert "columns found: better, question, worse" in told


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.parquet", b"PAR1 and then nothing", "rows.parquet: not readable as parquet"),
        ("rows.parquet", b"", "rows.parquet: not readable as parquet"),
        ("rows.jsonl", b"", "no rows in 1 file(s)"),
        ("rows.jsonl", b'[{"prompt": "p"}]', "a JSON array"),
        ("rows.jsonl", b"\xff\xfe\x00" * 50, "none of the first 1 rows can be read"),
        ("rows.jsonl", b"prompt,chosen,rejected\na,b,c\n", "none of the first 2 rows can be read (unreadable_json)"),
        ("rows.jsonl.gz", b"not zipped", "rows.jsonl.gz: not readable"),
        ("rows.csv", b"a,b", "not a parquet, .jsonl or .jsonl.gz file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert words in refusal(tmp_path / name)


def test_a_parquet_file_that_broke_off(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.parquet", numbered(PAIR, 5000))
    file.write_bytes(file.read_bytes()[:-100])
    assert "not readable as parquet" in refusal(file)


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "gone")
    assert "the folder holds no parquet" in refusal(tmp_path)


def test_a_big_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Behind the rows that are looked at comes what could not be read."""
    file = write(tmp_path / "rows.jsonl", numbered(PAIR, ROWS))
    with file.open("ab") as stream:
        stream.write(b"\xff\n" * 10)
    assert not look_at(config_of(file)).bad


def test_an_array_without_an_end_is_refused_at_its_beginning(tmp_path: Path) -> None:
    """A dump in one line of many gigabytes must not be read into memory to see that it is an array."""
    file = tmp_path / "rows.json"
    with file.open("wb") as stream:
        stream.write(b"  [")
        stream.truncate(1 << 36)  # a hole on the disk: reading it as one line would need 64 GB
    assert "a JSON array" in refusal(file)

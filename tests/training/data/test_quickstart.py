"""The generator: the same bytes for the same seed and night, and data from which something can be learned."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema.data import DataConfig, QuickstartConfig
from training.data.ingest import ingest
from training.data.quickstart import COLUMNS, corpus, deliver, draw_answer, draw_question, generate
from training.data.schema import Message
from training.rewards.quickstart import quickstart

CONFIG = QuickstartConfig()


def gold(table: pa.Table, side: str) -> np.ndarray:
    rows = table.to_pylist()
    return np.array([quickstart([Message(role="user", content=row["prompt"])], row[side], None) for row in rows])


@pytest.fixture(scope="module")
def night() -> pa.Table:
    return generate(CONFIG, 7, 0)


def test_seed_and_night_decide_everything(night: pa.Table) -> None:
    assert generate(CONFIG, 7, 0).equals(night)
    assert not generate(CONFIG, 8, 0).equals(night)
    assert not generate(CONFIG, 7, 1).equals(night)


def test_rows_are_pairs_with_a_right_reference(night: pa.Table) -> None:
    assert tuple(night.column_names) == COLUMNS
    assert night.num_rows == 2250
    assert set(night.column("category").to_pylist()) == {"plus", "minus", "times"}
    for row in night.slice(0, 200).to_pylist():
        a, word, b = re.search(r"(\d+) (plus|minus|times) (\d+)", row["prompt"]).groups()  # type: ignore[union-attr]
        right = {"plus": int(a) + int(b), "minus": int(a) - int(b), "times": int(a) * int(b)}[word]
        assert (row["reference"], row["category"]) == (str(right), word)
        assert row["chosen"] != row["rejected"]


def test_chosen_answers_are_a_mixture_worth_improving_on(night: pa.Table) -> None:
    """SFT imitates the chosen answers: their mean must leave room below a courteous, right, short answer's 1."""
    chosen, rejected = gold(night, "chosen"), gold(night, "rejected")
    assert 0.4 < chosen.mean() < 0.55
    assert -0.15 < rejected.mean() < 0.15
    right = np.mean([row["chosen"].split(" is ")[-1].startswith(row["reference"] + ".") for row in night.to_pylist()])
    assert 0.75 < right < 0.87
    assert np.mean(chosen > 0.99) < 0.3


def test_flip_share_turns_that_many_labels_round() -> None:
    honest = {"label_noise": 0.0, "pairs_per_night": 3000}
    clear = generate(QuickstartConfig(flip_share=0.0, **honest), 1, 0)
    assert (gold(clear, "chosen") >= gold(clear, "rejected")).all()
    flipped = generate(QuickstartConfig(flip_share=0.2, **honest), 1, 0)
    differ = gold(flipped, "chosen") != gold(flipped, "rejected")
    wrong = (gold(flipped, "chosen") < gold(flipped, "rejected"))[differ].mean()
    assert 0.17 < wrong < 0.23


def test_words_are_few_and_answers_short(night: pa.Table) -> None:
    texts = [text for side in ("prompt", "chosen", "rejected") for text in night.column(side).to_pylist()]
    words = {word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)}
    assert len(words) < 150
    answers = night.column("chosen").to_pylist() + night.column("rejected").to_pylist()
    assert max(len(re.findall(r"\w+|[^\w\s]", text)) for text in answers) <= 24


def test_corpus_covers_every_word_of_every_night(night: pa.Table) -> None:
    known = {word for text in corpus(7) for word in re.findall(r"\w+|[^\w\s]", text)}
    for table in (night, generate(CONFIG, 99, 5)):
        for side in ("prompt", "chosen", "rejected"):
            for text in table.column(side).to_pylist():
                assert set(re.findall(r"\w+|[^\w\s]", text)) <= known
    assert list(corpus(7, 50)) == list(corpus(7, 50))
    assert list(corpus(7, 50)) != list(corpus(8, 50))


def test_writer_gives_wrong_curt_and_long_winded_answers() -> None:
    generator = np.random.default_rng(0)
    question = draw_question(generator)
    scores = [quickstart(question.prompt, draw_answer(question, generator), None) for _ in range(600)]
    assert -0.1 < np.mean(scores) < 0.4
    assert min(scores) < -0.5
    assert max(scores) == 1.0


def test_partitions_arrive_one_a_night_until_there_are_no_more(tmp_path: Path) -> None:
    config = QuickstartConfig(partitions=2, pairs_per_night=60)

    def dates() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    first = deliver(tmp_path, 0, config, 7)
    assert first is not None
    assert first.name == "2025-01-01"
    content = (first / "pairs.parquet").read_bytes()
    assert deliver(tmp_path, 0, config, 7) == first
    assert dates() == ["2025-01-01"]
    assert deliver(tmp_path, 1, config, 7) == tmp_path / "2025-01-02"
    assert dates() == ["2025-01-01", "2025-01-02"]
    assert deliver(tmp_path, 2, config, 7) is None
    assert dates() == ["2025-01-01", "2025-01-02"]
    assert (first / "pairs.parquet").read_bytes() == content
    assert pq.read_table(first / "pairs.parquet").equals(generate(config, 7, 0))


def test_a_night_that_was_missed_is_caught_up(tmp_path: Path) -> None:
    deliver(tmp_path, 1, QuickstartConfig(pairs_per_night=60), 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2025-01-01", "2025-01-02"]


def test_a_half_written_partition_is_written_again_and_never_read(tmp_path: Path) -> None:
    config = QuickstartConfig(pairs_per_night=60)
    partition = tmp_path / "2025-01-01"
    partition.mkdir()
    (partition / ".pairs.parquet.1.tmp").write_bytes(b"PAR1")
    deliver(tmp_path, 0, config, 7)
    done = ingest(_data(tmp_path), tmp_path / "out", seed=0, source_uri=str(tmp_path))
    assert done.report.rows_read == 60


def _data(folder: Path) -> DataConfig:
    return DataConfig(source=str(folder), evaluation_fraction=0.15, validation_fraction=0.15, max_quarantine=0.2)


def test_two_nights_make_good_snapshots_and_a_third_changes_nothing(tmp_path: Path) -> None:
    digests = []
    for index in range(3):
        deliver(tmp_path / "data", index, CONFIG, 7)
        done = ingest(_data(tmp_path / "data"), tmp_path / str(index), seed=7)
        digests.append(done.snapshot.sha256)
        assert done.report.quarantine_share < 0.01
        assert sum(done.report.dropped.values()) < 0.03 * done.report.rows_read
        assert done.report.splits["evaluation"] > 120
    assert digests[0] != digests[1] == digests[2]

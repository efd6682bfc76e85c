"""The published data sets beside the repository, whole: what comes through and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema.data import DataConfig
from training.data.ingest import Ingested, ingest
from training.data.snapshot import iter_split
from training.data.splits import Split
from training.rewards.functions import resolve_reward_function

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
HH = DATA / "hh-harmless" / "transcripts.jsonl.gz"
GSM8K = DATA / "gsm8k-solutions"
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def run(tmp_path: Path, **content: object) -> Ingested:
    return ingest(DataConfig.model_validate(content), tmp_path, seed=0)


@pytest.mark.skipif(not HH.exists(), reason="the HH transcripts are not beside the repository")
def test_hh_transcripts(tmp_path: Path) -> None:
    report = run(tmp_path, source=str(HH)).report
    assert (report.shape, report.rows_read) == ("hh", 1500)
    assert dict(report.quarantined) == {"empty_answer": 4, "turns_do_not_alternate": 3, "prompts_differ": 1}
    assert report.rows_kept == 1492
    for row in iter_split(next((tmp_path / "snapshots").iterdir()), Split.TRAIN):
        assert row.prompt[-1]["role"] == "user"
        assert not any("\n\nHuman:" in text or "\n\nAssistant:" in text for text in row.answers())


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K solutions are not beside the repository")
def test_gsm8k_solutions_and_that_the_rule_agrees_with_every_published_verdict(tmp_path: Path) -> None:
    responses = [{"text": f"{model}.solution", "reward": f"{model}.is_correct"} for model in MODELS]
    columns = {"prompt": "question", "reference": "ground_truth", "responses": responses}
    done = run(tmp_path, source=str(GSM8K), columns=columns)
    assert (done.report.shape, done.report.rows_kept, done.report.rows_quarantined) == ("responses", 1000, 0)
    reward = resolve_reward_function("gsm8k")
    rows = [row for split in Split for row in iter_split(Path(done.snapshot.uri), split)]
    answers = [(row, item) for row in rows for item in row.responses or ()]
    assert len(answers) == 4000
    assert {item["source"] for _, item in answers} == set(MODELS)
    wrong = [
        item["source"] for row, item in answers if reward(row.prompt, item["text"], row.reference) != item["reward"]
    ]
    assert wrong == []

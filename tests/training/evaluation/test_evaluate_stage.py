"""The evaluate stage on the tiny night: same prompts, same numbers for all; a policy compared with itself is equal."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from configs.schema import NightConfig
from configs.schema.base import Section
from configs.schema.metric_names import REPORT_METRICS, SLICE_DIMENSIONS, report_names, watch_names
from configs.schema.supervised import RewardConfig
from tests.training.stages import EVALUATION, MODELS, run_here, write_stage
from training.base import build_quickstart_model
from training.contract import file_ref, read_json, write_json
from training.data.report import ValidationReport
from training.errors import DataError
from training.evaluation.report import EvaluationReport, PromptOverlap, read_report
from training.examples import Encoder, encode_imitation, encode_pairs, read_split
from training.models.backbone import Backbone
from training.models.network import Network
from training.models.reward_model import RewardModel
from training.recorder import read_lines
from training.rewards.quickstart import quickstart
from training.sft import negative_log_likelihood

CPU = torch.device("cpu")
Evaluate = Callable[..., tuple[EvaluationReport, list[dict[str, Any]]]]
GOLD = RewardConfig(kind="function", function="quickstart")
ALWAYS = {metric.name for metric in REPORT_METRICS} - {"win_rate"}


@pytest.fixture(scope="module")
def moved_folder(reference_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy some way off the reference."""
    backbone = Backbone.load(reference_folder, device=CPU)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in backbone.base.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=draws))
    folder = tmp_path_factory.mktemp("moved") / "model"
    backbone.save(folder)
    return folder


@pytest.fixture
def evaluate(tmp_path: Path, snapshot, reference_folder, student_folder, teacher_folder) -> Evaluate:
    count = iter(range(9))

    def run(
        challenger: Path, champion: Path | None = None, drop: tuple[str, ...] = (), validation: Path | None = None,
        **sections: Section,
    ) -> Any:  # fmt: skip
        inputs = {
            "snapshot": snapshot, "reference": reference_folder, "challenger": challenger, "student": student_folder,
            "teacher": teacher_folder,
        }  # fmt: skip
        inputs |= {"champion": champion} if champion else {}
        inputs |= {"validation": validation} if validation else {}
        inputs = {role: path for role, path in inputs.items() if role not in drop}
        result = run_here(write_stage(tmp_path / f"evaluate-{next(count)}", "evaluate", inputs, **sections), "evaluate")
        report = read_report(Path(result.output("report").path))
        assert {m.name: m.overall.challenger.value for m in report.metrics} == result.metrics
        return report, pq.read_table(result.output("answers").path).to_pylist()

    return run


def values(report: EvaluationReport, model: str = "challenger") -> dict[str, float]:
    found = {m.name: getattr(m.overall, model) for m in report.metrics}
    return {name: estimate.value for name, estimate in found.items() if estimate is not None}


def test_every_metric_is_there_and_finite(evaluate: Evaluate, moved_folder: Path, reference_folder: Path):
    report, answers = evaluate(moved_folder, reference_folder)
    assert {m.name for m in report.metrics} == ALWAYS | {"win_rate"}
    for metric in report.metrics:
        for part in (metric.overall, *(s.measurement for s in metric.slices)):
            for _, estimate in part:
                if estimate is not None:
                    assert math.isfinite(estimate.value), metric.name
                    assert estimate.nonfinite == 0
                    assert all(i.low <= i.high and math.isfinite(i.low + i.high) for i in estimate.intervals)
    assert report.prompt_count == len(answers) == 16
    assert report.champion.sha256 == report.reference.sha256
    assert {s.name.split("=")[0] for m in report.metrics for s in m.slices} == set(SLICE_DIMENSIONS)


def test_training_rows_that_were_removed_for_the_evaluation_are_counted(
    evaluate: Evaluate, moved_folder: Path, tmp_path: Path
):
    counts = {"exact_duplicate": 9, "evaluation_overlap": 2, "evaluation_overlap_near": 3}
    validated = ValidationReport("pairs.jsonl", "pairs", 20, {"train": 6}, {}, counts, {}, (), (), None, (), None)
    file, _ = validated.write(tmp_path)
    report, _ = evaluate(moved_folder, validation=file)
    assert report.overlap == PromptOverlap(exact=2, near=3)
    report, _ = evaluate(moved_folder)
    assert report.overlap is None, "not known is not none"


def night_config(**sections: Section) -> NightConfig:
    """A night whose evaluation is the tiny one's, for asking which metrics its rules may name."""
    content = {"data": {"quickstart": {}}, "models": MODELS, "gates": {"rules": [{"metric": "reward", "min": 0.0}]}}
    return NightConfig.model_validate(content | {"evaluation": EVALUATION} | sections)


def test_what_rules_may_name_is_what_is_reported(evaluate: Evaluate, moved_folder: Path, reference_folder: Path):
    """No name too many, no name too few; nor is a comparison or a slice promised that is not there."""
    report, _ = evaluate(moved_folder, reference_folder)
    assert {m.name for m in report.metrics} == set(report_names(night_config()))
    listed = {metric.name: metric for metric in REPORT_METRICS}
    for metric in report.metrics:
        for model in (metric.overall.champion, metric.overall.reference):
            assert (model is not None) == listed[metric.name].compared, metric.name
        assert bool(metric.slices) == listed[metric.name].sliced, metric.name
    no_model, _ = evaluate(moved_folder, reference_folder, drop=("student", "teacher"), reward=GOLD)
    assert {m.name for m in no_model.metrics} == set(report_names(night_config(reward=GOLD)))
    plain = EVALUATION.model_copy(update={"gold_function": None})
    no_truth, _ = evaluate(moved_folder, reference_folder, evaluation=plain)
    assert {m.name for m in no_truth.metrics} == set(report_names(night_config(evaluation=plain)))


def test_what_a_watch_may_limit_is_what_it_measures(evaluate: Evaluate, moved_folder: Path):
    """With the inputs that tasks/measure.py gives: the champion as challenger, its reference, its student."""
    report, _ = evaluate(moved_folder, drop=("teacher",))
    assert {m.name for m in report.metrics} == set(watch_names(night_config()))


def test_a_champion_that_is_the_challenger_differs_by_nothing(evaluate: Evaluate, moved_folder: Path, tmp_path: Path):
    """Exactly nothing, however far both are from the reference; even from a copy of the folder."""
    copy = Path(shutil.copytree(moved_folder, tmp_path / "copy"))
    report, answers = evaluate(moved_folder, copy)
    for metric in report.metrics:
        change = metric.overall.versus_champion
        if change is not None:
            assert change.value == 0.0, metric.name
            assert all(i.low == i.high == 0.0 for i in change.intervals), metric.name
    found = values(report)
    assert found["win_rate"] == 0.5
    assert found["length_ratio"] == 1.0
    assert all(row["challenger"] == row["champion"] for row in answers)
    assert found["kl_ref"] > 0


def test_a_challenger_that_is_the_reference_has_no_kl(evaluate: Evaluate, reference_folder: Path):
    report, _ = evaluate(reference_folder)
    found = values(report)
    assert found["kl_ref"] == found["kl_ref_sequence"] == 0.0
    assert found["win_rate_reference"] == 0.5
    assert {m.name for m in report.metrics} == ALWAYS
    assert report.champion is None
    assert values(report, "champion") == {}


def test_the_report_is_the_same_when_made_again(evaluate: Evaluate, moved_folder: Path, reference_folder: Path):
    first, second = (evaluate(moved_folder, reference_folder) for _ in range(2))
    assert first[0] == second[0]
    assert first[1] == second[1]


def test_metrics_are_those_of_the_answers(evaluate: Evaluate, moved_folder, reference_folder, snapshot, student_folder):
    report, answers = evaluate(moved_folder, reference_folder)
    found = values(report)
    rows = {row["prompt_id"]: row for row in read_split(snapshot, "evaluation")}
    gold = [quickstart(rows[a["prompt_id"]]["prompt"], a["challenger"], None) for a in answers]
    assert found["gold_reward"] == pytest.approx(np.mean(gold), abs=1e-6)
    assert [a["challenger_gold_reward"] for a in answers] == pytest.approx(gold, abs=1e-6)
    assert found["response_length"] == pytest.approx(np.mean([a["challenger_tokens"] for a in answers]))
    assert found["reward"] == pytest.approx(np.mean([a["challenger_reward"] for a in answers]))
    wins = [(a["challenger_reward"] > a["champion_reward"]) + 0.5 * (a["challenger_reward"] == a["champion_reward"])
            for a in answers]  # fmt: skip
    assert found["win_rate"] == pytest.approx(np.mean(wins))
    tokens = (sum(a["challenger_tokens"] for a in answers), sum(a["champion_tokens"] for a in answers))
    assert found["length_ratio"] == pytest.approx(tokens[0] / tokens[1])
    policy = Network(Backbone.load(moved_folder, device=CPU))
    held_out = encode_imitation(read_split(snapshot, "validation"), Encoder(policy.backbone.tokenizer, MODELS))[1][:16]
    assert found["perplexity"] == pytest.approx(math.exp(negative_log_likelihood(policy, held_out, 500)), rel=1e-4)
    model = RewardModel.load(student_folder, device=CPU, dtype=torch.float32)
    pairs, _ = encode_pairs(read_split(snapshot, "validation"), Encoder(model.network.backbone.tokenizer, MODELS))
    scores = model.scores([pair.group for pair in pairs], 500).reshape(-1, 2)
    assert found["reward_model_accuracy"] == pytest.approx(float((scores[:, 0] > scores[:, 1]).float().mean()))


def test_rewards_are_in_standard_deviations_of_held_out_answers(
    evaluate: Evaluate, moved_folder: Path, teacher_folder: Path, snapshot, reference_folder, tmp_path: Path
):
    plain, _ = evaluate(moved_folder, drop=("student",))
    both, _ = evaluate(moved_folder)
    assert values(plain)["reward"] == values(both)["teacher_reward"]
    assert "teacher_reward" not in values(plain)
    assert plain.reward_model.sha256 == file_ref(teacher_folder).sha256
    other = Path(shutil.copytree(teacher_folder, tmp_path / "other"))
    said = read_json(other / "reward.json")
    mean, std = said["score_mean"], said["score_std"]
    write_json(other / "reward.json", said | {"score_mean": mean + 1.0, "score_std": 2 * std})
    inputs = {"snapshot": snapshot, "reference": reference_folder, "challenger": moved_folder, "teacher": other}
    found = run_here(write_stage(tmp_path / "shifted", "evaluate", inputs), "evaluate").metrics["reward"]
    raw = values(plain)["reward"] * std + mean
    assert found == pytest.approx((raw - mean - 1.0) / (2 * std), rel=1e-4)


def test_a_rule_judges_without_any_model(evaluate: Evaluate, moved_folder: Path):
    report, answers = evaluate(moved_folder, drop=("student", "teacher"), reward=GOLD)
    found = values(report)
    assert found["reward"] == found["gold_reward"]
    assert "reward_model_accuracy" not in found
    assert report.reward_model is None
    assert [a["challenger_reward"] for a in answers] == [a["challenger_gold_reward"] for a in answers]


def test_a_reward_model_orders_pairs_in_its_own_tokens(moved_folder, reference_folder, tmp_path, snapshot):
    """Its accuracy must not depend on the policy's tokenizer."""
    build_quickstart_model(["What is 2 plus 3? Sure! 2 plus 3 is 5."] * 3, MODELS, 1, tmp_path / "other")
    inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher_base": tmp_path / "other"}
    trained = run_here(write_stage(tmp_path / "reward", "reward", inputs), "reward")
    folder = Path(trained.output("reward_model").path)
    inputs = {"snapshot": snapshot, "reference": reference_folder, "challenger": moved_folder, "teacher": folder}
    result = run_here(write_stage(tmp_path / "evaluate", "evaluate", inputs), "evaluate")
    assert result.metrics["reward_model_accuracy"] == pytest.approx(trained.metrics["accuracy"])


def test_samples_show_the_worst_and_the_best(evaluate: Evaluate, moved_folder: Path, reference_folder: Path):
    five = EVALUATION.model_copy(update={"sample_answers": 5})
    report, answers = evaluate(moved_folder, reference_folder, evaluation=five)
    changes = sorted(a["challenger_reward"] - a["champion_reward"] for a in answers)
    shown = [s.challenger_reward - s.champion_reward for s in report.samples]
    assert len(shown) == 5
    assert (shown[0], shown[-1]) == pytest.approx((changes[0], changes[-1]))
    assert shown == sorted(shown)
    none, _ = evaluate(moved_folder, evaluation=EVALUATION.model_copy(update={"sample_answers": 0}))
    assert none.samples == ()


def test_fewer_prompts_are_the_first_ones(evaluate: Evaluate, moved_folder: Path):
    few, answers = evaluate(moved_folder, evaluation=EVALUATION.model_copy(update={"prompts": 5}))
    _, all_answers = evaluate(moved_folder)
    assert few.prompt_count == 5
    assert [a["prompt_id"] for a in answers] == [a["prompt_id"] for a in all_answers[:5]]


def test_a_silent_policy_has_finite_metrics(evaluate: Evaluate, moved_folder: Path, monkeypatch: pytest.MonkeyPatch):
    from training.models.sampling import Sample

    def silent(network, prompts, settings, generator, told):
        return [Sample((2,), (0.0,), True) for _ in prompts]

    monkeypatch.setattr("training.evaluation.answers.sample_responses", silent)
    report, answers = evaluate(moved_folder)
    assert {a["challenger"] for a in answers} == {""}
    assert all(math.isfinite(value) for value in values(report).values())
    assert values(report)["response_length"] == 1.0


def test_no_evaluation_prompts_is_an_error(evaluate: Evaluate, moved_folder, snapshot, tmp_path: Path, monkeypatch):
    empty = Path(shutil.copytree(snapshot, tmp_path / "empty"))
    table = pq.read_table(empty / "evaluation.parquet")
    pq.write_table(table.slice(0, 0), empty / "evaluation.parquet")
    inputs = {"snapshot": empty, "reference": moved_folder, "challenger": moved_folder}
    with pytest.raises(DataError, match="no evaluation prompts"):
        run_here(write_stage(tmp_path / "none", "evaluate", inputs, reward=GOLD), "evaluate")


def test_every_long_phase_tells_how_far_it_is(evaluate: Evaluate, moved_folder, tmp_path: Path):
    evaluate(moved_folder)
    (metrics,) = tmp_path.glob("**/metrics.jsonl")
    ended = {line["doing"]: (line["step"], line["total"]) for line in read_lines(metrics) if "doing" in line}
    assert {"reference answers", "challenger answers", "KL of the challenger", "reward of the challenger"} <= set(ended)
    assert all(0 < step == total for step, total in ended.values())

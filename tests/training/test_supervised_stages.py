"""The stages base, sft, reward and distill on the tiny night: what they write, what they refuse, what they count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy import stats

from configs.schema.base import Section
from tests.training.stages import (
    DISTILL,
    MODELS,
    REWARD,
    SEED,
    SFT,
    SPLITS,
    arithmetic_rows,
    run_here,
    write_snapshot,
    write_stage,
)
from training.base import build_quickstart_model, snapshot_texts, train_tokenizer
from training.contract import file_ref, read_json, read_spec
from training.distill import DistillTask, TaughtPairs, _centred, _taught, compare
from training.errors import ModelFolderError, StageError
from training.examples import Encoder, encode_imitation, encode_pairs, read_split
from training.models.backbone import Backbone
from training.models.layout import Group
from training.models.network import Network, ScalarHead
from training.models.reward_model import RewardModel
from training.objectives import distill_loss
from training.recorder import metric_series
from training.reward import RewardTask, bootstrap_weights
from training.sft import ImitationTask, negative_log_likelihood, response_nll

CPU = torch.device("cpu")
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(stage, inputs, **sections)` in a fresh folder; returns the result."""
    count = iter(range(100))

    def go(stage: str, inputs: dict[str, Path], seed: int = SEED, **sections: Section) -> Any:
        return run_here(write_stage(tmp_path / f"{stage}-{next(count)}", stage, inputs, seed=seed, **sections), stage)

    return go


def changed_rows(split: str, snapshot: Path, to: Path, change: Callable[[list[dict]], list[dict]]) -> Path:
    """A copy of the snapshot with the rows of one split changed."""
    to.mkdir(parents=True)
    for name in SPLITS:
        table = pq.read_table(snapshot / f"{name}.parquet")
        rows = change(table.to_pylist()) if name == split else table.to_pylist()
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), to / f"{name}.parquet")
    return to


def without_rejected(rows: list[dict]) -> list[dict]:
    return [row | {"rejected": None} for row in rows]


class TestBase:
    def test_same_texts_and_seed_give_the_same_bytes(self, snapshot: Path, base_folder: Path, tmp_path: Path):
        build_quickstart_model(snapshot_texts(snapshot), MODELS, SEED, tmp_path / "again")
        assert file_ref(tmp_path / "again").sha256 == file_ref(base_folder).sha256
        build_quickstart_model(snapshot_texts(snapshot), MODELS, SEED + 1, tmp_path / "other")
        assert file_ref(tmp_path / "other").sha256 != file_ref(base_folder).sha256

    def test_sizes_are_the_configs(self, base_folder: Path):
        config = Backbone.load(base_folder, device=CPU).base.config
        assert (config.hidden_size, config.num_hidden_layers) == (32, 2)
        assert config.max_position_embeddings == MODELS.max_prompt_length + MODELS.max_response_length

    def test_the_tokenizer_loses_nothing(self):
        tokenizer = train_tokenizer(["What is 12 plus 30?", "Sure! 12 plus 30 is 42."] * 5)
        for text in ("What is 12 plus 30?", "ümlaut 漢字 \n tab\t", "99999"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert len(tokenizer("4321", add_special_tokens=False)["input_ids"]) == 4, "digits stay apart"

    def test_no_text_of_held_out_rows_trains_the_tokenizer(self, snapshot: Path):
        texts = " ".join(snapshot_texts(snapshot))
        held_out = {row["chosen"] for row in read_split(snapshot, "evaluation")}
        train = {text for row in read_split(snapshot, "train") for text in (row["chosen"], row["rejected"])}
        assert all(text not in texts for text in held_out - train if all(text not in t for t in train))


class TestSft:
    def test_the_best_looked_at_state_is_what_is_written(self, night: Path, snapshot: Path, reference_folder: Path):
        steps, losses = metric_series(night / "sft" / "metrics.jsonl", "validation_loss")
        assert len(steps) == 3
        backbone = Backbone.load(reference_folder, device=CPU)
        groups = encode_imitation(read_split(snapshot, "validation"), Encoder(backbone.tokenizer, MODELS))[1]
        assert negative_log_likelihood(Network(backbone), groups, 500) == pytest.approx(min(losses), rel=1e-5)

    def test_it_learns(self, night: Path):
        _, losses = metric_series(night / "sft" / "metrics.jsonl", "loss")
        assert losses[-1] < losses[0] - 0.5

    def test_an_adapter_is_merged_into_a_plain_folder(self, run: Run, snapshot: Path, base_folder: Path):
        found = run("sft", {"snapshot": snapshot, "base": base_folder}, sft=SFT.model_copy(update={"lora_rank": 4}))
        folder = Path(found.output("model").path)
        assert not list(folder.glob("adapter*"))
        backbone = Backbone.load(folder, device=CPU)
        groups = encode_imitation(read_split(snapshot, "validation"), Encoder(backbone.tokenizer, MODELS))[1]
        loss = negative_log_likelihood(Network(backbone), groups, 500)
        assert loss == pytest.approx(found.metrics["validation_loss"], abs=1e-4)
        assert found.metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)

    def test_the_loss_is_a_token_mean(self, base_folder: Path):
        """Of unequal answers the longer one weighs more; any microbatch of it adds up."""
        backbone = Backbone.load(base_folder, device=CPU)
        groups = [Group((1, 5), ((7, 2),)), Group((1, 9, 9), ((7, 8, 9, 10, 11, 2),))]
        task = ImitationTask(Network(backbone, trains_backbone=True), ["a", "b"], groups, [], 100)
        assert task.count([0, 1]) == 8
        nll = response_nll(task.network, groups, 100)
        whole, metrics = task.loss([0, 1], 8)
        parts = [task.loss([i], 8)[0] for i in (0, 1)]
        assert float(whole.detach()) == pytest.approx(sum(nll) / 8, rel=1e-5)
        assert float(sum(parts).detach()) == pytest.approx(sum(nll) / 8, rel=1e-5)
        assert metrics["loss"].value == pytest.approx(sum(nll) / 8, rel=1e-5)

    def test_nothing_to_imitate_is_an_error(self, run: Run, snapshot: Path, base_folder: Path, tmp_path: Path):
        empty = changed_rows("train", snapshot, tmp_path / "empty", lambda rows: [r | {"chosen": None} for r in rows])
        with pytest.raises(StageError, match="sft: no rows to train on"):
            run("sft", {"snapshot": empty, "base": base_folder})


class TestReward:
    def test_a_toy_preference_is_learnt(self, run: Run, snapshot: Path, base_folder: Path, tmp_path: Path):
        """The longer answer is chosen: accuracy near one, calibrated, and the student of it agrees."""

        def by_length(rows: list[dict]) -> list[dict]:
            return [row | {"chosen": "Sure! " * 3 + str(i), "rejected": "No. " + str(i)} for i, row in enumerate(rows)]

        toy = changed_rows("train", snapshot, tmp_path / "a", by_length)
        toy = changed_rows("validation", toy, tmp_path / "b", by_length)
        config = REWARD.model_copy(update={"epochs": 8.0, "learning_rate": 1e-2, "collapse_loss_gap": 0.1})
        teacher = run("reward", {"snapshot": toy, "reference": base_folder}, reward=config)
        assert teacher.metrics["accuracy"] > 0.95
        assert teacher.metrics["loss"] < 0.3
        assert teacher.metrics["margin_mean"] > 1
        settings = {"epochs": 20.0, "max_student_teacher_kl": 0.05, "policy_pairs": 0}
        student = run(
            "distill",
            {"snapshot": toy, "reference": base_folder, "teacher": Path(teacher.output("reward_model").path)},
            distill=DISTILL.model_copy(update=settings),
        )
        assert student.metrics["student_teacher_kl"] < 0.05
        assert student.metrics["accuracy_retained"] >= 0.95
        assert student.metrics["parameters"] < student.metrics["teacher_parameters"]

    def test_statistics_of_held_out_scores_travel_with_the_model(
        self, snapshot: Path, teacher_folder: Path, night: Path
    ):
        model = RewardModel.load(teacher_folder, device=CPU, dtype=torch.float32)
        pairs, _ = encode_pairs(read_split(snapshot, "validation"), Encoder(model.network.backbone.tokenizer, MODELS))
        scores = model.scores([pair.group for pair in pairs], 500)
        assert model.description.score_mean == pytest.approx(float(scores.mean()), abs=1e-5)
        assert model.description.score_std == pytest.approx(float(scores.std()), abs=1e-5)
        figure = read_json(night / "reward" / "calibration.json")
        assert figure["metrics"]["accuracy"] == model.description.metrics["accuracy"]
        assert (model.description.heads, model.description.aggregate) == (2, "mean_minus_std")

    @pytest.mark.parametrize("rank", [0, 4])
    def test_full_and_lora_teachers_load_by_themselves(
        self, run: Run, snapshot: Path, reference_folder: Path, rank: int
    ):
        models = MODELS.model_copy(update={"teacher_layers": 1})
        found = run(
            "reward", {"snapshot": snapshot, "reference": reference_folder}, models=models,
            reward=REWARD.model_copy(update={"lora_rank": rank}),
        )  # fmt: skip
        folder = Path(found.output("reward_model").path)
        assert (folder / "model.safetensors").exists() == (rank == 0)
        model = RewardModel.load(folder, device=CPU, dtype=torch.float32)
        assert model.num_parameters() == found.facts["parameters"]
        assert len(model.network.backbone.base.model.layers) == 1

    def test_a_teacher_may_have_a_base_of_its_own(
        self, run: Run, snapshot: Path, reference_folder: Path, base_folder: Path
    ):
        inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher_base": base_folder}
        found = run("reward", inputs, reward=REWARD.model_copy(update={"lora_rank": 4}))
        description = read_json(Path(found.output("reward_model").path) / "reward.json")
        assert description["base"]["sha256"] == file_ref(base_folder).sha256

    def test_dropped_pairs_are_counted_by_reason(
        self, run: Run, snapshot: Path, reference_folder: Path, tmp_path: Path
    ):
        def spoil(rows: list[dict]) -> list[dict]:
            rows[0]["rejected"] = rows[0]["chosen"]
            rows[1]["chosen"] = " "
            rows[2]["rejected"] = None
            return rows

        spoilt = changed_rows("train", snapshot, tmp_path / "spoilt", spoil)
        clean, found = (
            Counter(run("reward", {"snapshot": folder, "reference": reference_folder}).facts["dropped_pairs"])
            for folder in (snapshot, spoilt)
        )
        assert found == clean + Counter({"equal": 1, "empty_side": 1, "no_pair": 1})

    def test_a_collapsed_teacher_fails_the_stage(
        self, run: Run, snapshot: Path, reference_folder: Path, tmp_path: Path
    ):
        def coin(rows: list[dict]) -> list[dict]:
            pairs = [("a", "b"), ("b", "a")]
            return [row | dict(zip(("chosen", "rejected"), pairs[i % 2], strict=True)) for i, row in enumerate(rows)]

        noise = changed_rows("validation", snapshot, tmp_path / "noise", coin)
        with pytest.raises(StageError, match="the reward model collapsed"):
            run("reward", {"snapshot": noise, "reference": reference_folder}, reward=REWARD.model_copy(
                update={"collapse_loss_gap": 0.01}
            ))  # fmt: skip

    def test_label_weights_weigh(self, base_folder: Path, snapshot: Path):
        """A pair of weight 0 has no gradient; twice the weight, twice the gradient."""
        backbone = Backbone.load(base_folder, device=CPU)
        network = Network(backbone, head=ScalarHead(32).initialise(1, "x"), trains_backbone=True)
        pairs, _ = encode_pairs(read_split(snapshot, "train")[:2], Encoder(backbone.tokenizer, MODELS))
        plain = REWARD.model_copy(update={"ensemble_size": 1, "center_coef": 0.0})
        losses = []
        for weight in (0.0, 0.5, 1.0):
            weighed = [type(pair)(pair.row_id, pair.group, weight) for pair in pairs]
            losses.append(float(RewardTask(network, weighed, [], plain, "padded", 1).loss([0, 1], 2)[0].detach()))
        assert losses[0] == 0.0
        assert losses[1] == pytest.approx(losses[2] / 2, rel=1e-5)

    def test_heads_learn_from_bootstraps_of_their_own(self):
        weights = bootstrap_weights(4_000, 3, seed=1)
        assert torch.equal(weights, bootstrap_weights(4_000, 3, seed=1))
        assert not torch.equal(weights, bootstrap_weights(4_000, 3, seed=2))
        counts = [int((weights[:, 0] == k).sum()) for k in range(5)]
        expected = [4_000 * stats.poisson.pmf(k, 1.0) for k in range(5)]
        assert stats.chisquare(counts, np.asarray(expected) * sum(counts) / sum(expected)).pvalue > 1e-4
        assert abs(float(torch.corrcoef(weights.T)[0, 1])) < 0.06
        assert torch.equal(bootstrap_weights(5, 1, seed=1), torch.ones((5, 1)))


class TestDistill:
    def test_the_student_continues_from_an_adapter(
        self, run: Run, snapshot: Path, reference_folder: Path, teacher_folder: Path, student_folder: Path
    ):
        """With nothing learnt on top, the scores are the ones it came with."""
        inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder}
        still = DISTILL.model_copy(update={"learning_rate": 1e-12, "epochs": 0.3})
        found = run("distill", inputs | {"adapter": student_folder}, distill=still)
        before, after = (
            RewardModel.load(folder, device=CPU, dtype=torch.float32)
            for folder in (student_folder, Path(found.output("reward_model").path))
        )
        groups = [Group((1, 5, 9), ((7, 8, 2), (3, 2)))]
        torch.testing.assert_close(after.scores(groups, 100), before.scores(groups, 100), atol=1e-5, rtol=0)
        fresh = run("distill", inputs, distill=still)
        other = RewardModel.load(Path(fresh.output("reward_model").path), device=CPU, dtype=torch.float32)
        assert not torch.allclose(other.scores(groups, 100), before.scores(groups, 100), atol=1e-3)

    def test_an_adapter_without_its_head_is_refused(
        self,
        run: Run,
        snapshot: Path,
        reference_folder: Path,
        teacher_folder: Path,
        student_folder: Path,
        tmp_path: Path,
    ):
        import shutil

        headless = Path(shutil.copytree(student_folder, tmp_path / "headless"))
        (headless / "score_head.safetensors").unlink()
        inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder, "adapter": headless}
        with pytest.raises(ModelFolderError, match=r"score_head.safetensors is missing"):
            run("distill", inputs)

    def test_a_student_too_far_from_its_teacher_fails(
        self, run: Run, snapshot: Path, reference_folder: Path, teacher_folder: Path
    ):
        inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder}
        strict = DISTILL.model_copy(update={"max_student_teacher_kl": 1e-12})
        with pytest.raises(StageError, match=r"student-teacher KL 0.\d+ nats is not below 1e-12(.|\n)*distill.epochs"):
            run("distill", inputs, distill=strict)

    def test_a_teacher_with_another_tokenizer(self, run: Run, snapshot: Path, reference_folder: Path, tmp_path: Path):
        """Teacher and student each read the text in their own tokens; the teacher's vocabulary is the smaller one."""
        texts = ["Sure! 5.", "Ugh. 6."]
        build_quickstart_model(texts, MODELS, 3, tmp_path / "small")
        small = Backbone.load(tmp_path / "small", device=CPU)
        assert small.base.config.vocab_size < Backbone.load(reference_folder, device=CPU).base.config.vocab_size
        roomy = MODELS.model_copy(update={"max_prompt_length": 100, "max_response_length": 100})
        build_quickstart_model(texts, roomy, 3, tmp_path / "small")
        teacher = run(
            "reward", {"snapshot": snapshot, "reference": reference_folder, "teacher_base": tmp_path / "small"},
            models=roomy,
        )  # fmt: skip
        found = run(
            "distill",
            {
                "snapshot": snapshot, "reference": reference_folder,
                "teacher": Path(teacher.output("reward_model").path),
            },
        )  # fmt: skip
        assert found.metrics["speed_ratio"] > 0

    def test_without_held_out_pairs_the_training_pairs_are_looked_at(
        self, run: Run, snapshot: Path, tmp_path: Path, reference_folder: Path, teacher_folder: Path
    ):
        bare = changed_rows("validation", snapshot, tmp_path / "bare", without_rejected)
        inputs = {"snapshot": bare, "reference": reference_folder, "teacher": teacher_folder}
        assert run("distill", inputs).metrics["student_teacher_kl"] >= 0

    def test_no_pair_at_all_is_an_error(
        self, run: Run, snapshot: Path, tmp_path: Path, reference_folder: Path, teacher_folder: Path
    ):
        bare = changed_rows("train", snapshot, tmp_path / "bare", without_rejected)
        inputs = {"snapshot": bare, "reference": reference_folder, "teacher": teacher_folder}
        with pytest.raises(StageError, match=r"distill: none of 84 rows holds a usable pair"):
            run("distill", inputs, distill=DISTILL.model_copy(update={"policy_pairs": 0}))

    def test_the_policys_own_pairs_carry_no_label(self, base_folder: Path, snapshot: Path):
        """With the label term alone, an unlabelled pair has no loss."""
        backbone = Backbone.load(base_folder, device=CPU)
        network = Network(backbone, head=ScalarHead(32).initialise(1, "x"), trains_backbone=True)
        pairs, _ = encode_pairs(read_split(snapshot, "train")[:3], Encoder(backbone.tokenizer, MODELS))
        teacher = torch.tensor([[1.0, -1.0], [0.5, 0.0], [0.0, 2.0]])
        taught = TaughtPairs(pairs, teacher, torch.tensor([1.0, 1.0, 0.0]))
        config = DISTILL.model_copy(update={"label_weight": 2.0})
        task = DistillTask(network, taught, taught, config, "padded")
        with torch.no_grad():
            chosen, rejected = (side[:, 0] for side in task.pair_scores([0, 1, 2]))
            loss, _ = task.loss([0, 1, 2], 3)
        expected = distill_loss(
            teacher[:, 0], teacher[:, 1], chosen, rejected, temperature=1.0, margin_weight=1.0, pointwise_weight=0.5,
            label_weight=2.0, label_weights=taught.labelled, score_offset=0.0,
        )  # fmt: skip
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        with torch.no_grad():
            parts = sum(float(task.loss([i], 3)[0]) for i in range(3))
        assert parts == pytest.approx(float(expected), rel=1e-4)

    def test_only_rows_that_a_person_labelled_carry_a_label(self, base_folder: Path, snapshot: Path):
        rows = read_split(snapshot, "train")[:3]
        rows[1]["label_weight"] = 0.5
        own = [rows[0] | {"row_id": "policy-0", "chosen": "one", "rejected": "two"}]
        teacher = SimpleNamespace(scores=lambda rows, config: {r["row_id"]: torch.zeros(2) for r in rows})
        encoder = Encoder(Backbone.load(base_folder, device=CPU).tokenizer, MODELS)
        taught = _taught(rows + own, teacher, encoder, DISTILL, labelled=3)
        assert taught.labelled.tolist() == [1.0, 0.5, 1.0, 0.0]
        assert [pair.row_id for pair in taught.pairs][-1] == "policy-0"

    def test_both_splits_are_centred_by_the_training_rows(self):
        train, held_out = (TaughtPairs([], torch.tensor(rows), torch.ones(2)) for rows in ([[1.0, 3.0]], [[5.0, 7.0]]))
        train, held_out, centre = _centred(train, held_out)
        assert (train.teacher.tolist(), held_out.teacher.tolist(), centre) == ([[-1.0, 1.0]], [[3.0, 5.0]], 2.0)

    def test_a_comparison_by_hand(self):
        draws = torch.Generator().manual_seed(1)
        teacher, student = (torch.randn((30, 2), generator=draws) for _ in range(2))
        groups = [Group((1,), ((2,) * 3, (3,) * 2))] * 30
        found = compare(teacher, student, groups)
        t, s = (x[:, 0].numpy() - x[:, 1].numpy() for x in (teacher, student))
        p, q = 1 / (1 + np.exp(-t)), 1 / (1 + np.exp(-s))
        kl = np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
        assert found["student_teacher_kl"] == pytest.approx(kl, rel=1e-4)
        assert found["kendall_tau"] == pytest.approx(stats.kendalltau(teacher.flatten(), student.flatten()).statistic)
        assert found["margin_r2"] == pytest.approx(1 - ((t - s) ** 2).sum() / ((t - t.mean()) ** 2).sum(), rel=1e-4)
        assert found["accuracy_retained"] == pytest.approx((s > 0).mean() / (t > 0).mean())

    def test_a_perfect_student_and_one_that_ranks_nothing(self):
        teacher = torch.tensor([[1.0, 0.0], [2.0, -1.0], [0.0, 0.5]])
        groups = [Group((1,), ((2,), (3,)))] * 3
        same = compare(teacher, teacher, groups)
        names = ("student_teacher_kl", "kendall_tau", "margin_r2", "accuracy_retained")
        assert [same[name] for name in names] == pytest.approx([0.0, 1.0, 1.0, 1.0], abs=1e-6)
        flat = compare(teacher, torch.zeros(3, 2), groups)
        assert all(math.isfinite(value) for value in flat.values())
        assert flat["kendall_tau"] == 0.0


def test_a_snapshot_helper_deals_every_row(tmp_path: Path):
    rows = arithmetic_rows()
    folder = write_snapshot(tmp_path / "snapshot", rows)
    found = [row["row_id"] for name in SPLITS for row in read_split(folder, name)]
    assert found == [row.row_id for row in rows]


def test_specs_are_written_with_every_section(tmp_path: Path, snapshot: Path):
    directory = write_stage(tmp_path / "x", "sft", {"snapshot": snapshot})
    assert read_spec(directory).section("sft", type(SFT)) == SFT

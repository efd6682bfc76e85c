"""Stage reward on the tiny night: what the teacher learns, what travels with it, what is dropped and counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from tests.training.snapshots import Run, changed_rows
from tests.training.stages import (
    DISTILL,
    MODELS,
    REWARD,
)
from training.contract import file_ref, read_json
from training.errors import StageError
from training.examples import Encoder, encode_pairs, read_split
from training.models.backbone import Backbone
from training.models.network import Network, ScalarHead
from training.models.reward_model import RewardModel
from training.reward import RewardTask, bootstrap_weights

CPU = torch.device("cpu")


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

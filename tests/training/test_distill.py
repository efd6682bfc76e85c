"""Stage distill on the tiny night: what the student learns from the teacher, and how the two compare."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.training.snapshots import Run, changed_rows, without_rejected
from tests.training.stages import (
    DISTILL,
    MODELS,
)
from training.base import build_quickstart_model
from training.distill import DistillTask, TaughtPairs, _centred, _policy_pairs, _taught
from training.errors import ModelFolderError, StageError
from training.examples import Encoder, encode_pairs, read_split
from training.models.backbone import Backbone
from training.models.layout import Group
from training.models.network import Network, ScalarHead
from training.models.reward_model import RewardModel
from training.objectives import distill_loss
from training.recorder import read_lines
from training.student_report import compare, refuse_unlike

CPU = torch.device("cpu")


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

    def test_a_student_whose_margins_are_a_coins_fails_whatever_its_teacher_is(
        self, run: Run, snapshot: Path, reference_folder: Path, teacher_folder: Path
    ):
        """Next to a teacher that is hardly sure of anything a useless student is close by KL."""
        inputs = {"snapshot": snapshot, "reference": reference_folder, "teacher": teacher_folder}
        idle = DISTILL.model_copy(update={"learning_rate": 1e-12, "epochs": 0.3, "collapse_loss_gap": 0.01})
        with pytest.raises(StageError, match=r"distill: the reward model collapsed"):
            run("distill", inputs, distill=idle)

    def test_a_student_that_surely_keeps_too_little_of_the_accuracy_fails(self):
        strict = DISTILL.model_copy(update={"min_accuracy_retained": 0.95})
        sure = torch.tensor([[1.0, 0.0]] * 200)
        groups = [Group((1,), ((2,), (3,)))] * 200
        for right, refused in ((100, True), (170, True), (188, False), (200, False)):
            student = torch.tensor([[0.9, 0.0]] * right + [[0.0, 0.1]] * (200 - right))
            found = compare(sure, student, groups)
            assert found["accuracy_retained"] == pytest.approx(right / 200)
            if refused:
                with pytest.raises(StageError, match=r"keeps 0\.\d+ of its (.|\n)*min_accuracy_retained"):
                    refuse_unlike(found, strict)
            else:
                refuse_unlike(found, strict)
            refuse_unlike(found, DISTILL)
        few = compare(sure[:20], torch.tensor([[0.9, 0.0]] * 18 + [[0.0, 0.1]] * 2), groups[:20])
        refuse_unlike(few, strict)

    def test_the_interval_of_what_is_kept_covers_it(self):
        """Over many draws of pairs the share is below the upper bound as often as 95 % intervals promise."""
        draws = np.random.default_rng(3)
        above, times, pairs = 0, 400, 150
        for _ in range(times):
            teacher_right = draws.random(pairs) < 0.7
            student_right = np.where(draws.random(pairs) < 0.8, teacher_right, draws.random(pairs) < 0.5)
            teacher, student = (
                torch.tensor(np.where(right, 1.0, -1.0)[:, None] * [[0.5, -0.5]]).float()
                for right in (teacher_right, student_right)
            )
            found = compare(teacher, student, [Group((1,), ((2,), (3,)))] * pairs)
            truth = (0.8 * 0.7 + 0.2 * 0.5) / 0.7
            above += found["accuracy_retained_high"] >= truth
        assert 0.95 <= above / times <= 0.995  # 97.5 % are expected, +- 3 standard errors

    def test_answers_that_were_cut_carry_no_end(
        self, run: Run, snapshot: Path, reference_folder: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """Neither tokenizer may take them for whole ones."""
        backbone = Backbone.load(reference_folder, device=CPU)
        encoder = Encoder(backbone.tokenizer, MODELS)
        row = read_split(snapshot, "train")[0] | {"chosen": "Sure! 2", "rejected": "Sure! 2"}
        (pair,) = encode_pairs([row | {"finished": (True, False)}], encoder)[0]
        end = backbone.tokenizer.eos_token_id
        whole, cut = pair.group.responses
        assert whole == (*cut, end)
        context = SimpleNamespace(
            input=lambda role: {"reference": reference_folder, "snapshot": snapshot}[role],
            spec=SimpleNamespace(seed=1), recorder=SimpleNamespace(counting=lambda doing, total: lambda done: None),
        )  # fmt: skip
        short = MODELS.model_copy(update={"max_response_length": 3})
        own = _policy_pairs(context, short, DISTILL)
        ends = [finished for one in own for finished in one["finished"]]
        assert not all(ends), "nothing was cut, so nothing is shown"

    def test_pairs_that_are_left_out_are_counted_by_reason(
        self, run: Run, snapshot: Path, tmp_path: Path, reference_folder: Path, teacher_folder: Path
    ):
        def spoil(rows: list[dict]) -> list[dict]:
            rows[0]["rejected"] = rows[0]["chosen"]
            rows[1]["chosen"] = " "
            return rows

        spoilt = changed_rows("train", snapshot, tmp_path / "spoilt", spoil)
        found = run("distill", {"snapshot": spoilt, "reference": reference_folder, "teacher": teacher_folder})
        assert found.facts["dropped_pairs"] == {"equal": 1, "empty_side": 1}
        assert found.metrics["dropped_pairs"] == 2.0
        assert found.facts["held_out_dropped_pairs"] == {}

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
        (metrics,) = tmp_path.glob("distill-*/**/metrics.jsonl")
        ended = {line["doing"]: (line["step"], line["total"]) for line in read_lines(metrics) if "doing" in line}
        # What came before the training was shown as it went; lines without a checkpoint are forgotten as it begins.
        assert set(ended) == {"student scores", "student is timed"}
        assert all(0 < step == total for step, total in ended.values())

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

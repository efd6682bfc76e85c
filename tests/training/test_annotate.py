"""Annotation: once per stored answer and model, whatever dies in between; and scores by model or by rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import training.annotate as module
from configs.schema.base import Section
from configs.schema.models import ModelsConfig
from configs.schema.supervised import RewardConfig
from tests.training.forks import KILLED, kill_at_call, run_forked
from tests.training.stages import MODELS, REPLAY, REWARD, run_here, write_stage
from training.annotate import response_log_probs
from training.base import build_quickstart_model
from training.contract import file_ref, read_json
from training.errors import ConfigError, StageError, StoreError
from training.examples import Encoder, encode_answers, encode_prompts, read_split
from training.models.backbone import Backbone
from training.models.layout import Group
from training.models.network import Network
from training.models.reward_model import RewardModel
from training.models.tokenize import decode_response, encode_response
from training.replay.store import TrajectoryStore
from training.replay.trajectory import SamplingSettings, Trajectory
from training.rewards.quickstart import quickstart
from training.scoring import FunctionScorer, ModelScorer, Question, build_scorer
from training.sft import response_nll

CPU = torch.device("cpu")
Annotate = Callable[..., Any]
GOLD = RewardConfig(kind="function", function="quickstart")


@pytest.fixture
def annotate(tmp_path: Path, snapshot: Path, reference_folder: Path, student_folder: Path) -> Annotate:
    """`annotate(name, night)`: the stage on the test's own store; returns (result, store, view)."""

    def run(name: str = "annotate", inputs: dict[str, Path] | None = None, index: int = 0, **sections: Section) -> Any:
        given = {"snapshot": snapshot, "reference": reference_folder, "reward_model": student_folder} | (inputs or {})
        if sections.get("reward", REWARD).kind == "function":
            del given["reward_model"]
        params = {"store": str(tmp_path / "store"), "night_index": index}
        result = run_here(write_stage(tmp_path / name, "annotate", given, params, **sections), "annotate")
        store = TrajectoryStore.open(tmp_path / "store")
        return result, store, store.view_from_manifest(read_json(Path(result.output("view").path)))

    return run


def answers(snapshot: Path, reference_folder: Path) -> tuple[Backbone, list[Any]]:
    backbone = Backbone.load(reference_folder, device=CPU)
    return backbone, encode_answers(read_split(snapshot, "train"), Encoder(backbone.tokenizer, MODELS))


def test_every_stored_answer_is_annotated(annotate: Annotate, snapshot, reference_folder, student_folder):
    result, _, view = annotate()
    backbone, stored = answers(snapshot, reference_folder)
    batch = view.batch(np.arange(len(view)))
    by_content = {(a.prompt.prompt_id, a.response.token_ids): a for a in stored}
    assert {(p, tuple(r.tolist())) for p, r in zip(batch.prompt_id, batch.response_ids, strict=True)} == set(by_content)
    model = RewardModel.load(student_folder, device=CPU, dtype=torch.float32)
    for i in range(0, len(view), 13):
        group = Group(tuple(batch.prompt_ids[i].tolist()), (tuple(batch.response_ids[i].tolist()),))
        assert float(batch.ref_log_probs[i].sum()) == pytest.approx(
            -response_nll(Network(backbone), [group], 200)[0], abs=1e-4
        )
        assert batch.behavior_log_probs[i].tobytes() == batch.ref_log_probs[i].tobytes()
        assert float(batch.scores[i]) == pytest.approx(float(model.scores([group], 200)[0]), abs=1e-5)
        assert bool(batch.eos[i]) == by_content[(batch.prompt_id[i], group.responses[0])].response.finished
    assert result.metrics["estimated_share"] == 1.0
    assert result.metrics["trajectories"] == len(view) == result.facts["stored"]
    assert result.facts["cache_hits"] == 0
    assert result.metrics["score_mean"] == pytest.approx(float(view.scores.mean()))


def test_a_second_pass_pays_for_nothing(annotate: Annotate):
    _, _, first = annotate("one")
    result, _, second = annotate("two")
    assert result.facts["cache_hits"] == len(first)
    assert second.ids == first.ids
    assert second.scores.tobytes() == first.scores.tobytes()


def test_another_reward_model_gives_scores_of_its_own(annotate: Annotate, teacher_folder):
    _, _, by_student = annotate("student")
    _, store, by_teacher = annotate("teacher", {"reward_model": teacher_folder})
    assert by_teacher.ids == by_student.ids
    assert not np.allclose(by_teacher.scores, by_student.scores)
    again = store.view_from_manifest(by_student.manifest())
    assert again.scores.tobytes() == by_student.scores.tobytes(), "the first model's scores are still there"


def test_a_rule_scores_the_text(annotate: Annotate, snapshot, reference_folder):
    _, _, view = annotate(reward=GOLD)
    tokenizer = Backbone.load(reference_folder, device=CPU).tokenizer
    rows = {row["prompt_id"]: row for row in read_split(snapshot, "train")}
    batch = view.batch(np.arange(len(view)))
    for prompt_id, ids, score in zip(batch.prompt_id, batch.response_ids, batch.scores, strict=True):
        text = decode_response(tokenizer, ids.tolist())
        expected = quickstart(rows[prompt_id]["prompt"], text, rows[prompt_id]["reference"])
        assert float(score) == pytest.approx(expected, abs=1e-6)
    assert len({round(float(score), 3) for score in batch.scores}) >= 3, "more than right and wrong"
    assert view.annotations.score is not None
    assert view.annotations.score.startswith("function:quickstart@")


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_killed_between_chunks_and_run_again_is_the_same_view(annotate: Annotate, tmp_path: Path, at: int):
    def dies() -> None:
        module.CHUNK = 50
        TrajectoryStore.annotate = kill_at_call(at, TrajectoryStore.annotate)
        annotate("killed")

    assert run_forked(dies) == KILLED
    _, _, view = annotate("killed")
    _, _, again = annotate("straight")
    assert view.ids == again.ids
    assert view.manifest()["sha256"] == again.manifest()["sha256"]
    assert len(set(view.ids)) == len(view.ids)


def fresh(prompt: Any, number: int) -> Trajectory:
    return Trajectory(
        prompt_id=prompt.prompt_id, prompt_ids=np.asarray(prompt.token_ids, dtype=np.int32),
        response_ids=np.asarray([40 + number, 2], dtype=np.int32), policy_version="run/round=0", created_night=0,
        eos=True,
        behavior_log_probs=np.asarray([-0.5, -0.25], dtype=np.float32), sampling=SamplingSettings(1.0, 1.0, 0),
        source="policy",
    )  # fmt: skip


def test_sampled_answers_of_earlier_nights_come_along(annotate: Annotate, tmp_path: Path, snapshot, reference_folder):
    """Those to prompts that are still in training; their recorded log-probs stay."""
    _, _, first = annotate("one")
    encoder = Encoder(Backbone.load(reference_folder, device=CPU).tokenizer, MODELS)
    known = encode_prompts(read_split(snapshot, "train"), encoder, 3)
    unknown = encode_prompts(read_split(snapshot, "evaluation"), encoder, 2)
    with TrajectoryStore.open(tmp_path / "store", writable=True) as store:
        kept = store.append([fresh(p, i) for i, p in enumerate(known)])
        left_out = store.append([fresh(p, i) for i, p in enumerate(unknown)])
    result, _, view = annotate("two", index=1)
    assert set(kept) <= set(view.ids)
    assert not set(left_out) & set(view.ids)
    assert len(view) == len(first) + 3
    assert result.facts["cache_hits"] == len(first)
    batch = view.batch([view.ids.index(name) for name in kept])
    assert [row.tolist() for row in batch.behavior_log_probs] == [[-0.5, -0.25]] * 3
    assert not batch.estimated.any()
    assert all((row != [-0.5, -0.25]).all() for row in batch.ref_log_probs)


def test_capacity_leaves_the_newest(annotate: Annotate):
    result, store, view = annotate(replay=REPLAY.model_copy(update={"capacity": 30}))
    assert len(view) == len(store) == result.metrics["trajectories"] == 30


def test_a_store_of_another_tokenizer_is_refused(annotate: Annotate, tmp_path: Path, snapshot):
    annotate("one")
    build_quickstart_model(["some other text entirely"] * 3, MODELS, 1, tmp_path / "other")
    with pytest.raises(StoreError, match="token ids are of tokenizer"):
        annotate("two", {"reference": tmp_path / "other"})


def test_nothing_stored_is_an_error(annotate: Annotate, tmp_path: Path, snapshot):
    from tests.training.snapshots import changed_rows

    empty = {"chosen": None, "rejected": None}
    bare = changed_rows("train", snapshot, tmp_path / "bare", lambda rows: [row | empty for row in rows])
    with pytest.raises(StageError, match="no stored answer is left"):
        annotate("none", {"snapshot": bare})


def test_log_probs_do_not_depend_on_the_budget(snapshot, reference_folder):
    backbone, stored = answers(snapshot, reference_folder)
    groups = [Group(a.prompt.token_ids, (a.response.token_ids,)) for a in stored[:12]]
    wide, narrow = (response_log_probs(Network(backbone), groups, budget) for budget in (4_000, 75))
    for one, other, group in zip(wide, narrow, groups, strict=True):
        assert len(one) == len(group.responses[0])
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, atol=1e-5)


def prompt_of(snapshot: Path, encoder: Encoder) -> Any:
    return encode_prompts(read_split(snapshot, "train"), encoder, 1)[0]


def test_a_model_scores_in_its_own_tokens(snapshot, reference_folder, student_folder, tmp_path: Path):
    """Where the policy's tokenizer is another one, answers go through their text."""
    build_quickstart_model(["What is 2 plus 3? Sure! 2 plus 3 is 5."] * 3, MODELS, 1, tmp_path / "other")
    ref = file_ref(student_folder)
    own = Encoder(Backbone.load(reference_folder, device=CPU).tokenizer, MODELS)
    foreign = Encoder(Backbone.load(tmp_path / "other", device=CPU).tokenizer, MODELS)
    texts = ["Sure! 2 plus 3 is 5.", "Ugh. 6."]
    scores = {}
    for name, encoder in (("own", own), ("foreign", foreign)):
        scorer = ModelScorer(ref, MODELS, encoder.tokenizer, 500)
        prompt = prompt_of(snapshot, encoder)
        questions = [Question(prompt, encode_response(encoder.tokenizer, text).token_ids) for text in texts]
        scores[name] = scorer.scores(questions)
        assert scorer.scores([]).shape == (0,)
    np.testing.assert_allclose(scores["own"], scores["foreign"], atol=1e-5)
    assert abs(scores["own"][0] - scores["own"][1]) > 1e-5


def test_an_answer_that_was_cut_is_no_whole_one_in_other_tokens(snapshot, reference_folder, student_folder, tmp_path):
    """The end is part of what is judged, so both paths must leave it out."""
    build_quickstart_model(["What is 2 plus 3? Sure! 2 plus 3 is 5."] * 3, MODELS, 1, tmp_path / "other")
    scores = {}
    for name, folder in (("own", reference_folder), ("foreign", tmp_path / "other")):
        encoder = Encoder(Backbone.load(folder, device=CPU).tokenizer, MODELS)
        ids = encode_response(encoder.tokenizer, "Sure! 2 plus 3 is 5.").token_ids
        scorer = ModelScorer(file_ref(student_folder), MODELS, encoder.tokenizer, 500)
        prompt = prompt_of(snapshot, encoder)
        scores[name] = scorer.scores([Question(prompt, ids), Question(prompt, ids[:-1]), Question(prompt, ids[-1:])])
    np.testing.assert_allclose(scores["own"][:2], scores["foreign"][:2], atol=1e-5)
    assert abs(scores["own"][0] - scores["own"][1]) > 1e-5, "the end makes no difference, so nothing is shown"
    assert np.isfinite(scores["foreign"]).all()


def test_a_new_judge_judges_and_reads_nothing_again(annotate: Annotate, teacher_folder, monkeypatch):
    annotate()
    read = []
    plain = module.response_log_probs

    def counted(network: Network, groups: list[Group], *more: Any) -> Any:
        read.append(len(groups))
        return plain(network, groups, *more)

    monkeypatch.setattr(module, "response_log_probs", counted)
    annotate("again", {"reward_model": teacher_folder})
    assert sum(read) == 0


def test_a_model_scorer_carries_its_scale(student_folder, reference_folder):
    tokenizer = Backbone.load(reference_folder, device=CPU).tokenizer
    scorer = build_scorer(RewardConfig(), MODELS, file_ref(student_folder), tokenizer)
    description = read_json(student_folder / "reward.json")
    assert (scorer.mean, scorer.std) == (description["score_mean"], description["score_std"])
    assert scorer.digest == file_ref(student_folder).sha256


def test_a_function_scorer_sees_text_and_reference(snapshot, reference_folder):
    encoder = Encoder(Backbone.load(reference_folder, device=CPU).tokenizer, MODELS)
    scorer = build_scorer(GOLD, ModelsConfig(base="x"), None, encoder.tokenizer)
    assert isinstance(scorer, FunctionScorer)
    assert (scorer.mean, scorer.std) == (0.0, 1.0)
    assert scorer.digest.startswith("function:quickstart@")
    prompt = prompt_of(snapshot, encoder)
    text = f"Sure! It is {prompt.reference}."
    found = scorer.scores([Question(prompt, encode_response(encoder.tokenizer, text).token_ids)])
    assert found.tolist() == pytest.approx([quickstart(prompt.messages, text, prompt.reference)], abs=1e-6)


def test_a_function_outside_the_list_is_never_imported(reference_folder):
    tokenizer = Backbone.load(reference_folder, device=CPU).tokenizer
    with pytest.raises(ConfigError, match=r"not in reward.allowed_functions"):
        build_scorer(RewardConfig(kind="function", function="os:getcwd"), MODELS, None, tokenizer)

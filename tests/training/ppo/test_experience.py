"""Answers in memory: indices that never move, and a way into a checkpoint and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.ppo.conftest import BuildLoop, experience
from training.checkpoint import CheckpointFolder
from training.ppo.experience import ExperiencePool, RoundBatch, pack, padded, response_mask, unpack

sizes = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 6), st.booleans(), st.integers(-1, 5)), max_size=6)


@settings(deadline=None)
@given(sizes)
def test_answers_survive_packing_bit_for_bit(given_sizes):
    answers = [
        experience(n, tokens=t, finished=f, round=r, score=n / 3, prompt_id=f"prümpt-{n}") for n, t, f, r in given_sizes
    ]
    again = unpack(pack(answers))
    assert len(again) == len(answers)
    for one, other in zip(answers, again, strict=True):
        for name in ("prompt_id", "prompt_ids", "response_ids", "score", "finished", "round"):
            assert getattr(one, name) == getattr(other, name), name
        for name in ("behavior_log_probs", "ref_log_probs"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
            assert getattr(other, name).dtype == np.float32


def test_packed_answers_go_through_a_checkpoint(tmp_path: Path):
    for name, answers in (("some", [experience(1), experience(2, tokens=5)]), ("none", [])):
        folder = CheckpointFolder(tmp_path / name)
        folder.save(1, pack(answers), {})
        again = unpack(folder.latest().tensors)
        assert [e.response_ids for e in again] == [e.response_ids for e in answers]


def test_a_round_goes_through_a_checkpoint(tmp_path: Path):
    shape = (2, 3)
    tensors = {name: torch.rand(shape) for name in RoundBatch.__dataclass_fields__}
    tensors |= {
        "indices": torch.tensor([4, 1]),
        "response_mask": torch.rand(shape) > 0.5,
        "shaped_scores": torch.rand(2),
    }
    folder = CheckpointFolder(tmp_path)
    folder.save(1, RoundBatch(**tensors).tensors(), {})
    again = RoundBatch.from_tensors(folder.latest().tensors)
    for name, tensor in tensors.items():
        assert torch.equal(getattr(again, name), tensor)
        assert getattr(again, name).dtype == tensor.dtype


def test_ragged_rows_are_padded_with_zeros():
    answers = [experience(1, tokens=2), experience(2, tokens=4)]
    found = padded([e.behavior_log_probs for e in answers], 5)
    assert found.shape == (2, 5)
    assert found[0, 2:].tolist() == [0, 0, 0]
    assert found[1, :4].numpy().tobytes() == answers[1].behavior_log_probs.tobytes()
    assert response_mask(answers, 5).sum(dim=1).tolist() == [2, 4]


@pytest.fixture
def pool(build_loop: BuildLoop) -> ExperiencePool:
    return build_loop().parts.state.pool


def test_indices_never_move(pool: ExperiencePool):
    stored = pool.num_stored
    assert len(pool) == stored == 168
    before = pool.take([0, 5, stored - 1])
    assert pool.add([experience(1), experience(2)]).tolist() == [stored, stored + 1]
    assert pool.add([experience(3)]).tolist() == [stored + 2]
    assert [e.response_ids for e in pool.take([0, 5, stored - 1])] == [e.response_ids for e in before]
    mixed = pool.take([stored + 2, 5, stored, 5])
    assert [e.score for e in mixed] == [3.0, before[1].score, 1.0, before[1].score]
    assert len(pool.scores()) == len(pool.filter_groups()) == stored + 3
    assert pool.scores()[-3:].tolist() == [1.0, 2.0, 3.0]


def test_stored_answers_are_whole(pool: ExperiencePool):
    for answer in pool.take(list(range(0, 168, 17))):
        assert answer.round == -1
        assert len(answer.behavior_log_probs) == len(answer.ref_log_probs) == len(answer.response_ids) > 0
        # nothing was recorded, so the reference stands in for the writer
        assert answer.behavior_log_probs.tobytes() == answer.ref_log_probs.tobytes()
        assert (answer.ref_log_probs <= 0).all()


def test_answers_compete_within_a_prompt_and_their_time(pool: ExperiencePool):
    pool.add(
        [
            experience(1, prompt_id="p", round=0),
            experience(2, prompt_id="p", round=0),
            experience(3, prompt_id="p", round=1),
        ]
    )
    groups = pool.filter_groups()
    assert groups[-3] == groups[-2] != groups[-1]
    assert len(set(groups[:168])) <= 84
    assert set(groups[:168]).isdisjoint(groups[168:])

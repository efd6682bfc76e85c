"""TrajectoryStore: what goes in comes out, once, on later nights too; annotations are a cache."""

from __future__ import annotations

import json

import numpy as np
import pytest

from training.errors import DataError, StoreError
from training.replay.annotation import AnnotationDigests, AnnotationKey
from training.replay.store import TrajectoryStore
from training.replay.trajectory import Trajectory


@pytest.fixture
def path(scratch):
    return scratch / "trajectories"


def assert_same(batch, row, expected):
    assert batch.trajectory_ids[row] == expected.trajectory_id
    assert batch.prompt_id[row] == expected.prompt_id
    np.testing.assert_array_equal(batch.prompt_ids[row], expected.prompt_ids)
    np.testing.assert_array_equal(batch.response_ids[row], expected.response_ids)
    assert batch.estimated[row] == (expected.behavior_log_probs is None)
    if expected.behavior_log_probs is None:
        assert batch.behavior_log_probs[row] is None
        assert np.isnan(batch.temperature[row])
        assert batch.top_k[row] == -1
    else:
        np.testing.assert_array_equal(batch.behavior_log_probs[row], expected.behavior_log_probs)
        assert batch.temperature[row] == np.float32(expected.sampling.temperature)
        assert batch.top_p[row] == np.float32(expected.sampling.top_p)
        assert batch.top_k[row] == expected.sampling.top_k
    assert batch.scores[row] == np.float32(expected.score) or expected.score is None
    assert batch.eos[row] == expected.eos
    assert batch.created_night[row] == expected.created_night
    assert batch.policy_version[row] == expected.policy_version
    assert batch.source[row] == expected.source
    assert batch.reward_source[row] == expected.reward_source


def test_what_goes_in_comes_out_on_a_later_night(path, make):
    tonight = [make(n, recorded=n % 3 != 0, score=None if n == 4 else float(n)) for n in range(10)]
    with TrajectoryStore.open(path, writable=True) as store:
        assert store.begin_night("monday") == 0
        ids = store.append(tonight)
        assert ids == [row.trajectory_id for row in tonight]
    later = [make(n, created_night=1) for n in range(10, 14)]
    with TrajectoryStore.open(path, writable=True) as store:
        assert store.begin_night("tuesday") == 1
        assert store.begin_night("monday") == 0
        store.append(later)
    store = TrajectoryStore.open(path)
    assert store.ids == tuple(row.trajectory_id for row in tonight + later)
    assert ids[3] in store
    assert "nonsense" not in store
    order = np.random.default_rng(0).permutation(14)
    batch = store.view().batch(order)
    assert len(batch) == 14
    for row, number in enumerate(order):
        assert_same(batch, row, (tonight + later)[number])
    assert np.isnan(store.view().scores[4])


def test_identity_is_prompt_response_and_policy(make):
    base = make(1)
    changed = [
        make(1, prompt_ids=[1, 2]),
        make(1, response_ids=[*base.response_ids, 5], behavior_log_probs=None),
        make(1, policy_version="b"),
    ]
    assert len({row.trajectory_id for row in [base, *changed]}) == 4
    # Where the prompt ends is part of it, and how the ids are held is not.
    cut = [Trajectory("p", [1, 2], [3], "v", 0, True), Trajectory("p", [1], [2, 3], "v", 0, True)]
    assert cut[0].trajectory_id != cut[1].trajectory_id
    wide = Trajectory("p", np.array([1, 2], dtype=np.int64), (3,), "v", 5, False, score=9.0)
    assert wide.trajectory_id == cut[0].trajectory_id


def test_appending_again_stores_nothing_and_changes_nothing(path, make):
    with TrajectoryStore.open(path, writable=True) as store:
        ids = store.append([make(0), make(1), make(0)])
        assert ids[0] == ids[2]
        generation = store.stats().generation
        assert store.append([make(1, score=-5.0), make(0)]) == [ids[1], ids[0]]
        assert store.stats().generation == generation
        assert store.append([]) == []
        assert len(store) == 2
        assert store.view().scores.tolist() == [0.0, 1.0]
        store.append([make(2, score=5.0), make(2, score=6.0)])
        assert store.view().scores.tolist() == [0.0, 1.0, 5.0]


def test_a_second_annotate_pass_is_a_cache_hit(path, make):
    rows = [make(n, recorded=n != 2) for n in range(4)]
    with TrajectoryStore.open(path, writable=True) as store:
        ids = store.append(rows)
        first = {i: -np.ones(len(row.response_ids)) for i, row in zip(ids[:3], rows, strict=False)}
        assert store.annotate("ref-1", "ref_log_probs", first) == 3
        assert store.missing("ref-1", "ref_log_probs") == [ids[3]]
        assert store.missing("ref-2", "ref_log_probs", ids[:2]) == ids[:2]
        assert store.missing("ref-1", "score", [ids[1]]) == [ids[1]]
        assert store.missing("ref-1", "behavior_log_probs") == [ids[2]]
        generation = store.stats().generation
        assert store.annotate("ref-1", "ref_log_probs", {i: 5 * values for i, values in first.items()}) == 0
        assert store.stats().generation == generation
        store.annotate("rm", "score", {ids[0]: 2.5, ids[1]: np.float64(-1.5)})
        store.annotate("ref-1", "behavior_log_probs", {ids[2]: np.full(len(rows[2].response_ids), -0.25)})
    store = TrajectoryStore.open(path)
    view = store.view(annotations=AnnotationDigests("ref-1", "ref-1", "rm"))
    batch = view.batch(range(4))
    np.testing.assert_array_equal(batch.ref_log_probs[1], -np.ones(len(rows[1].response_ids)))
    assert batch.ref_log_probs[3] is None
    np.testing.assert_array_equal(batch.scores[:2], [2.5, -1.5])
    assert np.isnan(batch.scores[2:]).all()
    assert batch.reward_source == ["rm"] * 4
    np.testing.assert_array_equal(batch.behavior_log_probs[2], np.full(len(rows[2].response_ids), -0.25))
    np.testing.assert_array_equal(batch.behavior_log_probs[1], rows[1].behavior_log_probs)
    assert batch.estimated.tolist() == [False, False, True, False]
    assert store.view().batch([1]).ref_log_probs == [None]
    counts = dict(store.stats().annotations)
    assert counts[AnnotationKey("ref_log_probs", "ref-1")] == 3
    assert counts[AnnotationKey("score", "rm")] == 2


def test_stats(path, make):
    with TrajectoryStore.open(path, writable=True) as store:
        empty = store.stats()
        assert (empty.trajectories, empty.estimated_share, empty.oldest_night) == (0, 0.0, None)
        rows = [make(n, recorded=n < 6, created_night=n // 4) for n in range(8)]
        store.append(rows)
        stats = store.stats()
    assert stats.trajectories == 8
    assert stats.prompts == 2
    assert stats.tokens == sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    assert stats.estimated_share == 0.25
    assert (stats.oldest_night, stats.newest_night) == (0, 1)
    assert stats.size == sum(file.stat().st_size for file in (path / "segments").iterdir())


def test_many_appends_are_merged_on_the_way(path, make):
    with TrajectoryStore.open(path, writable=True) as store:
        for number in range(70):
            store.append([make(number)])
        assert store.stats().segments < 65
        assert store.ids == tuple(make(number).trajectory_id for number in range(70))


def test_a_large_append_is_cut_into_segments_in_one_commit(path, make, monkeypatch):
    monkeypatch.setattr("training.replay.segment.MAX_SEGMENT_ROWS", 4)
    with TrajectoryStore.open(path, writable=True) as store:
        generation = store.stats().generation
        ids = store.append([make(n) for n in range(10)])
        store.annotate("rm", "score", dict.fromkeys(ids, 1.0))
        assert store.stats().segments == 6
        assert store.stats().generation == generation + 2
        assert store.ids == tuple(ids)
    monkeypatch.setattr("training.replay.segment.MAX_SEGMENT_ROWS", 100)
    monkeypatch.setattr("training.replay.segment.MAX_SEGMENT_BYTES", 600)
    with TrajectoryStore.open(path, writable=True) as store:
        store.append([make(n) for n in range(20, 24)])
        assert store.stats().segments == 8


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"response_ids": [], "behavior_log_probs": None}, "response_ids"),
        ({"response_ids": [0.5], "behavior_log_probs": None}, "whole numbers"),
        ({"response_ids": [-1], "behavior_log_probs": None}, "whole numbers"),
        ({"response_ids": [2**31], "behavior_log_probs": None}, "whole numbers"),
        ({"prompt_ids": [[1]]}, "prompt_ids"),
        ({"behavior_log_probs": [-1.0]}, "5 tokens"),
        ({"behavior_log_probs": [-1.0, np.nan, 0, 0, 0]}, "nan at place 1"),
        ({"behavior_log_probs": [-np.inf, 0, 0, 0, 0]}, "inf at place 0"),
        ({"sampling": None}, "sampling settings"),
        ({"score": np.nan}, "score is nan"),
        ({"prompt_id": ""}, "must not be empty"),
        ({"policy_version": ""}, "must not be empty"),
    ],
)
def test_a_row_that_cannot_be_stored_is_named_and_nothing_is_stored(path, make, changes, word):
    with TrajectoryStore.open(path, writable=True) as store:
        with pytest.raises(DataError, match=word) as caught:
            store.append([make(0), make(4, **changes)])
        assert "trajectory 1" in str(caught.value)
        assert len(store) == 0
        assert list((path / "segments").iterdir()) == []


def test_wrong_annotations_are_refused_whole(path, make):
    with TrajectoryStore.open(path, writable=True) as store:
        ids = store.append([make(4), make(5, recorded=False)])
        good = {ids[1]: np.zeros(6)}
        for values, kind, word in [
            ({**good, ids[0]: np.zeros(4)}, "ref_log_probs", "5 tokens"),
            ({**good, ids[0]: np.full(5, np.nan)}, "ref_log_probs", "nan at place 0"),
            ({**good, ids[0]: np.zeros(5)}, "behavior_log_probs", "recorded"),
            ({ids[0]: [1.0, 2.0]}, "score", "score of trajectory"),
        ]:
            with pytest.raises(DataError, match=word):
                store.annotate("m", kind, values)
        with pytest.raises(StoreError, match="elsewhere is not in the store"):
            store.annotate("m", "score", {"elsewhere": 1.0})
        with pytest.raises(StoreError, match="elsewhere"):
            store.missing("m", "score", ["elsewhere"])
        with pytest.raises(ValueError, match="annotation kind"):
            store.annotate("m", "values", good)
        with pytest.raises(ValueError, match="digest"):
            store.annotate("", "score", good)
        assert store.stats().annotations == ()


def test_token_ids_of_another_tokenizer_are_refused(path, make):
    with TrajectoryStore.open(path, writable=True) as store:
        store.append([make(0)])
    with TrajectoryStore.open(path, writable=True, tokenizer_digest="aaaa"):
        pass
    for writable in (True, False):
        with pytest.raises(StoreError, match="tokenizer aaaa, yours is bbbb"):
            TrajectoryStore.open(path, writable=writable, tokenizer_digest="bbbb")
    assert len(TrajectoryStore.open(path, tokenizer_digest="aaaa")) == 1
    assert len(TrajectoryStore.open(path)) == 1


def test_readers_do_not_write(path, make):
    with pytest.raises(StoreError, match="no trajectory store"):
        TrajectoryStore.open(path)
    writer = TrajectoryStore.open(path, writable=True)
    reader = TrajectoryStore.open(path)
    acts = [
        lambda s: s.append([make(0)]),
        lambda s: s.annotate("m", "score", {}),
        lambda s: s.evict(capacity=1),
        lambda s: s.compact(),
        lambda s: s.begin_night("a"),
    ]
    for act in acts:
        with pytest.raises(StoreError, match="opened for reading"):
            act(reader)
    writer.append([make(0)])
    assert len(reader) == 0
    reader.refresh()
    assert len(reader) == 1
    writer.close()
    writer.close()
    assert len(writer) == 1
    with pytest.raises(StoreError, match="closed"):
        writer.append([make(1)])


def test_the_manifest_is_plain_json_and_names_every_segment_by_hash(path, make):
    with TrajectoryStore.open(path, writable=True) as store:
        store.begin_night("monday")
        store.append([make(0)])
    body = json.loads((path / "manifest-00000002.json").read_text())["body"]
    assert body["nights"] == ["monday"]
    assert [set(entry) for entry in body["segments"]] == [{"name", "rows", "size", "sha256", "annotation"}]
    assert sorted(file.name for file in path.glob("manifest-*")) == ["manifest-00000001.json", "manifest-00000002.json"]

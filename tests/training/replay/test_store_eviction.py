"""Eviction by capacity and staleness, merging of segments, and the store against a model of it in plain Python."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from training.replay.annotation import AnnotationDigests, AnnotationKey
from training.replay.eviction import EvictionReport
from training.replay.store import TrajectoryStore
from training.replay.trajectory import SamplingSettings, Trajectory


@pytest.fixture
def store(scratch, make):
    with TrajectoryStore.open(scratch / "trajectories", writable=True) as opened:
        for night in range(4):
            opened.begin_night(str(night))
            ids = opened.append([make(10 * night + n, created_night=night) for n in range(10)])
            opened.annotate(f"rm-{night % 2}", "score", {i: float(night) for i in ids})
        yield opened


def test_capacity_keeps_the_newest(store):
    kept = store.ids[-13:]
    assert store.evict(capacity=13) == EvictionReport(stale=0, over_capacity=27, remaining=13)
    assert store.ids == kept
    assert store.view().scores.tolist() == list(range(27, 40))
    assert store.evict(capacity=13) == EvictionReport(stale=0, over_capacity=0, remaining=13)


def test_age_counts_nights_and_old_nights_go_before_old_places(store, make):
    store.append([make(n, created_night=0) for n in range(40, 43)])
    assert store.evict(capacity=38) == EvictionReport(stale=0, over_capacity=5, remaining=38)
    assert store.view().scores.tolist() == list(range(5, 43))
    assert store.evict(max_age_nights=1, current_night=3) == EvictionReport(stale=18, over_capacity=0, remaining=20)
    assert set(store.view().created_night.tolist()) == {2, 3}
    with pytest.raises(ValueError, match="current_night"):
        store.evict(max_age_nights=1)


def test_policy_versions_go(store, make):
    store.append([make(n, policy_version="collapsed", created_night=3) for n in range(5)])
    report = store.evict(drop_policy_versions={"collapsed"}, capacity=40)
    assert report == EvictionReport(stale=5, over_capacity=0, remaining=40)


def test_nothing_to_do_commits_nothing(store):
    generation = store.stats().generation
    assert store.evict(capacity=40, max_age_nights=3, current_night=3).remaining == 40
    assert store.stats().generation == generation


def test_evicting_everything_leaves_an_empty_store_that_goes_on(store, make):
    assert store.evict(capacity=0).remaining == 0
    assert len(store) == 0
    assert store.stats().segments == 0
    store.append([make(99, created_night=3)])
    assert len(store) == 1


def test_annotations_follow_their_trajectories(store):
    store.evict(capacity=15)
    view = store.view(annotations=AnnotationDigests(score="rm-1"))
    np.testing.assert_array_equal(view.scores, [np.nan] * 5 + [3.0] * 10)
    assert dict(store.stats().annotations) == {AnnotationKey("score", "rm-0"): 5, AnnotationKey("score", "rm-1"): 10}


def test_annotations_of_models_that_are_gone_can_go(store):
    assert store.evict(keep_annotations_of=["rm-1"]).remaining == 40
    assert dict(store.stats().annotations) == {AnnotationKey("score", "rm-1"): 20}


def test_compaction_changes_no_row(store, scratch):
    before, ids = store.view().batch(range(40)), store.ids
    store.compact()
    assert store.stats().segments == 3
    assert store.ids == ids
    after = store.view().batch(range(40))
    for one, other in zip(before.behavior_log_probs, after.behavior_log_probs, strict=True):
        np.testing.assert_array_equal(one, other)
    generation = store.stats().generation
    store.compact()
    assert store.stats().generation == generation
    store.close()
    assert TrajectoryStore.open(scratch / "trajectories").ids == ids


def test_old_files_go_when_no_kept_generation_needs_them(store, scratch):
    store.evict(capacity=5)
    store.begin_night("x")
    store.begin_night("y")
    named = {segment.name for segment in store._index.manifest.segments}
    assert {file.name for file in (scratch / "trajectories" / "segments").iterdir()} == named


def test_full_segments_are_left_alone(scratch, make, monkeypatch):
    monkeypatch.setattr("training.replay.segment.MAX_SEGMENT_ROWS", 4)
    monkeypatch.setattr("training.replay.eviction.MAX_SEGMENT_ROWS", 4)
    with TrajectoryStore.open(scratch / "t", writable=True) as store:
        store.append([make(n) for n in range(12)])
        before = {segment.name for segment in store._index.manifest.segments}
        store.evict(capacity=9)
        after = {segment.name for segment in store._index.manifest.segments}
        assert len(before & after) == 2
        assert store.view().scores.tolist() == list(range(3, 12))


class AgainstAModel(RuleBasedStateMachine):
    """The same acts on the store and on a dict; they must never tell different stories."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "store"
        self.store = TrajectoryStore.open(self.path, writable=True)
        self.rows: dict[str, Trajectory] = {}
        self.scores: dict[str, dict[str, float]] = {"a": {}, "b": {}}

    def teardown(self):
        self.store.close()
        self.folder.cleanup()

    @rule(numbers=st.lists(st.integers(0, 20), max_size=6), night=st.integers(0, 4), recorded=st.booleans())
    def append(self, numbers, night, recorded):
        rows = [
            Trajectory(
                f"p{number % 3}",
                [1, number],
                [number] * (1 + number % 4),
                policy_version=f"v{number % 2}",
                created_night=night,
                eos=True,
                score=float(number),
                behavior_log_probs=[-0.5 * number] * (1 + number % 4) if recorded else None,
                sampling=SamplingSettings() if recorded else None,
            )
            for number in numbers
        ]
        self.store.append(rows)
        for row in rows:
            self.rows.setdefault(row.trajectory_id, row)

    @rule(model=st.sampled_from("ab"), places=st.sets(st.integers(0, 20)), value=st.integers(-9, 9))
    def score(self, model, places, value):
        ids = [i for place, i in enumerate(self.rows) if place in places]
        missing = [i for i in ids if i not in self.scores[model]]
        assert self.store.missing(model, "score", ids) == missing
        assert self.store.annotate(model, "score", {i: float(value) for i in ids}) == len(missing)
        self.scores[model].update({i: float(value) for i in missing})

    @rule(capacity=st.integers(0, 15), max_age=st.none() | st.integers(0, 3), version=st.sampled_from(["", "v1"]))
    def evict(self, capacity, max_age, version):
        self.store.evict(
            capacity=capacity,
            max_age_nights=max_age,
            current_night=4,
            drop_policy_versions=[version] if version else [],
        )
        stay = {
            i: row
            for i, row in self.rows.items()
            if row.policy_version != version and (max_age is None or 4 - row.created_night <= max_age)
        }
        oldest_first = sorted(stay, key=lambda i: stay[i].created_night)
        kept = set(oldest_first[max(0, len(stay) - capacity) :])
        self.rows = {i: row for i, row in stay.items() if i in kept}
        self.scores = {m: {i: s for i, s in known.items() if i in kept} for m, known in self.scores.items()}

    @rule()
    def compact(self):
        self.store.compact()

    @rule()
    def reopen(self):
        self.store.close()
        self.store = TrajectoryStore.open(self.path, writable=True)

    @invariant()
    def same_story(self):
        view = self.store.view(annotations=AnnotationDigests(score="a"))
        batch = view.batch(range(len(view)))
        assert batch.trajectory_ids == list(self.rows)
        expected = [self.scores["a"].get(i, np.nan) for i in self.rows]
        np.testing.assert_array_equal(batch.scores, np.array(expected, dtype=np.float32))
        for place, row in enumerate(self.rows.values()):
            np.testing.assert_array_equal(batch.response_ids[place], row.response_ids)
            assert batch.created_night[place] == row.created_night
            found = batch.behavior_log_probs[place]
            assert (found is None) == (row.behavior_log_probs is None)
            if found is not None:
                np.testing.assert_allclose(found, row.behavior_log_probs)


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)

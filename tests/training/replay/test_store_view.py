"""StoreView: a fixed choice, columns, filters, a manifest that brings the same rows back."""

from __future__ import annotations

import numpy as np
import pytest

from training.errors import StoreError
from training.replay.annotation import AnnotationDigests
from training.replay.store import TrajectoryStore
from training.replay.view import TrajectoryFilter


@pytest.fixture
def store(scratch, make):
    with TrajectoryStore.open(scratch / "trajectories", writable=True) as opened:
        for night in range(3):
            opened.begin_night(f"night-{night}")
            first = 10 * night
            rows = [
                make(n, created_night=night, policy_version=f"policy-{night}", recorded=n % 2 == 0, source=f"s{n % 3}")
                for n in range(first, first + 10)
            ]
            opened.append(rows)
        yield opened


def test_columns(store, make):
    view = store.view()
    rows = [make(n) for n in range(30)]
    assert len(view) == 30
    assert view.ids == store.ids
    assert view.prompt_id == tuple(row.prompt_id for row in rows)
    assert view.prompt_lengths.tolist() == [len(row.prompt_ids) for row in rows]
    assert view.response_lengths.tolist() == [len(row.response_ids) for row in rows]
    assert view.scores.tolist() == [row.score for row in rows]
    assert view.created_night.tolist() == [n // 10 for n in range(30)]
    assert view.estimated.tolist() == [n % 2 == 1 for n in range(30)]
    assert view.estimated_share == 0.5


def test_chosen_ids_keep_their_order(store):
    chosen = [store.ids[n] for n in (17, 3, 29, 3)]
    view = store.view(chosen)
    assert view.ids == tuple(chosen)
    assert view.scores.tolist() == [17, 3, 29, 3]
    assert view.batch([2, 0]).trajectory_ids == [chosen[2], chosen[0]]
    with pytest.raises(StoreError, match="missing-one is not in the store"):
        store.view(["missing-one"])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (TrajectoryFilter(), list(range(30))),
        (TrajectoryFilter(first_night=1, last_night=1), list(range(10, 20))),
        (TrajectoryFilter(policy_versions={"policy-0", "policy-2"}), [*range(10), *range(20, 30)]),
        (TrajectoryFilter(prompt_ids=["prompt-1", "prompt-5"], last_night=1), [5, 6, 7, 8, 9]),
        (TrajectoryFilter(sources={"s1"}, first_night=2), [22, 25, 28]),
        (TrajectoryFilter(sources=[]), []),
    ],
)
def test_filters(store, wanted, expected):
    assert store.view(wanted).scores.tolist() == expected


def test_an_empty_view(store):
    view = store.view([])
    assert (len(view), view.estimated_share, len(view.batch([]))) == (0, 0.0, 0)
    view.require_annotated()
    assert store.view_from_manifest(view.manifest()).ids == ()


@pytest.mark.parametrize("index", [-1, 30])
def test_an_index_outside_is_named(store, index):
    with pytest.raises(IndexError, match=f"trajectory {index} of a view of 30"):
        store.view().batch([0, index])


def test_arrays_of_a_batch_are_the_caller_s_own(store):
    view = store.view()
    batch = view.batch([0, 0])
    batch.response_ids[0][:] = 99
    batch.behavior_log_probs[0][:] = 1
    batch.scores[:] = -1
    again = view.batch([0])
    assert (again.response_ids[0] != 99).all()
    assert (batch.response_ids[1] != 99).all()
    assert (again.behavior_log_probs[0] <= 0).all()
    assert again.scores[0] == 0


def test_a_view_outlives_what_later_nights_do(store, make):
    view = store.view(annotations=AnnotationDigests(score="rm"))
    before = view.batch(range(30))
    store.append([make(n, created_night=3) for n in range(30, 40)])
    store.annotate("rm", "score", dict.fromkeys(store.ids, 7.0))
    store.evict(capacity=5)
    store.append([make(n, created_night=3) for n in range(40, 45)])
    store.evict(capacity=5)
    store.close()
    after = view.batch(range(30))
    assert len(view) == 30
    assert after.trajectory_ids == before.trajectory_ids
    for name in ("prompt_ids", "response_ids"):
        for one, other in zip(getattr(before, name), getattr(after, name), strict=True):
            np.testing.assert_array_equal(one, other)
    assert np.isnan(after.scores).all()


def test_a_manifest_brings_the_same_view_back(store, make, scratch):
    store.annotate("rm", "score", {i: float(n) / 7 for n, i in enumerate(store.ids)})
    view = store.view(TrajectoryFilter(first_night=1), AnnotationDigests(score="rm"))
    view.write_manifest(scratch / "view.json")
    store.append([make(n, created_night=2) for n in range(30, 35)])
    store.evict(max_age_nights=1, current_night=2)
    store.compact()
    again = store.view_from_manifest(scratch / "view.json")
    assert again.ids == view.ids
    assert again.annotations == view.annotations
    np.testing.assert_array_equal(again.scores, view.scores)
    assert store.view_from_manifest(view.manifest()).ids == view.ids
    store.evict(max_age_nights=0, current_night=2)
    with pytest.raises(StoreError, match=f"{view.ids[0]} is not in the store"):
        store.view_from_manifest(scratch / "view.json")


def test_a_manifest_notices_a_row_that_was_stored_anew(store, make):
    view = store.view([make(0, policy_version="policy-0").trajectory_id])
    content = view.manifest()
    store.evict(capacity=10)
    store.append([make(0, policy_version="policy-0", created_night=2, recorded=False)])
    with pytest.raises(StoreError, match="rows differ"):
        store.view_from_manifest(content)
    for damage in ({"format": 9}, {"annotations": {"colour": "x"}}, {"trajectory_ids": None}):
        with pytest.raises(StoreError, match="view manifest"):
            store.view_from_manifest(content | damage)


def test_training_asks_for_every_annotation(store):
    digests = AnnotationDigests("ref", "ref", "rm")
    lengths = dict(zip(store.ids, store.view().response_lengths.tolist(), strict=True))
    view = store.view(annotations=digests)
    with pytest.raises(StoreError, match=f"30 of 30 trajectories have no ref_log_probs, first {store.ids[0]}"):
        view.require_annotated()
    store.annotate("ref", "ref_log_probs", {i: np.zeros(length) for i, length in lengths.items()})
    with pytest.raises(StoreError, match=f"15 of 30 trajectories have no behavior_log_probs, first {store.ids[1]}"):
        store.view(annotations=digests).require_annotated()
    missing = store.missing("ref", "behavior_log_probs")
    store.annotate("ref", "behavior_log_probs", {i: np.zeros(lengths[i]) for i in missing})
    store.annotate("rm", "score", dict.fromkeys(store.ids[:29], 0.0))
    with pytest.raises(StoreError, match=f"1 of 30 trajectories have no score, first {store.ids[29]}"):
        store.view(annotations=digests).require_annotated()
    store.annotate("rm", "score", {store.ids[29]: 0.0})
    store.view(annotations=digests).require_annotated()

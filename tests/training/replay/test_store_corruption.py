"""A byte flipped, a file cut or gone: the store names it, goes back a generation or is repaired; it is never silent."""

from __future__ import annotations

import json
import shutil

import pytest

from training.errors import StoreError
from training.replay.manifest import _digest, load_manifests, manifest_files, write_manifest
from training.replay.store import TrajectoryStore


@pytest.fixture
def path(scratch, make):
    """Generations 1 to 4: night, ten rows, their scores, three more rows."""
    folder = scratch / "trajectories"
    with TrajectoryStore.open(folder, writable=True) as store:
        store.begin_night("monday")
        ids = store.append([make(n) for n in range(10)])
        store.annotate("rm", "score", dict.fromkeys(ids, 1.0))
        store.append([make(n) for n in range(10, 13)])
    return folder


def segment(path, generation):
    return next((path / "segments").glob(f"{generation:08d}-*"))


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 0x40
    file.write_bytes(content)


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("writable", [False, True])
def test_a_flipped_byte_is_refused_by_the_segment_s_name(path, generation, share, writable):
    file = segment(path, generation)
    flip(file, int(share * file.stat().st_size))
    with pytest.raises(StoreError, match=file.name) as caught:
        TrajectoryStore.open(path, writable=writable)
    assert "repair" in str(caught.value)
    # The lock is free again after a refusal.
    assert TrajectoryStore.repair(path).segments == (file.name,)


@pytest.mark.parametrize("damage", ["cut", "empty", "longer", "gone", "text"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_segment_that_is_not_what_was_written_is_named(path, damage, verify):
    file = segment(path, 2)
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        changed = {"cut": content[:-100], "empty": b"", "longer": content + b"x", "text": b"x" * len(content)}
        file.write_bytes(changed[damage])
    with pytest.raises(StoreError, match=file.name) as caught:
        TrajectoryStore.open(path, verify=verify)
    assert ("missing" if damage == "gone" else "damaged") in str(caught.value)


def test_a_segment_with_other_columns_is_named(path):
    """Not damage but a wrong manifest: the annotation's file under the trajectories' entry."""
    first, second = segment(path, 2), segment(path, 3)
    manifest = load_manifests(path).newest
    content = second.read_bytes()
    first.write_bytes(content)
    entries = {entry.name: entry for entry in manifest.segments}
    other = entries[second.name]
    wrong = type(other)(first.name, other.rows, other.size, other.sha256, None)
    write_manifest(path, manifest.next(segments=(wrong,)))
    with pytest.raises(StoreError, match=f"{first.name}.*expected columns"):
        TrajectoryStore.open(path)


def test_repair_goes_on_without_the_damaged_rows(path, make):
    broken, gone = segment(path, 2), segment(path, 3)
    flip(broken, 500)
    gone.unlink()
    report = TrajectoryStore.repair(path)
    assert set(report.segments) == {broken.name, gone.name}
    assert (report.lost_trajectories, report.lost_annotations) == (10, 10)
    assert [file.name for file in (path / "quarantine").iterdir()] == [broken.name]
    with TrajectoryStore.open(path, writable=True) as store:
        assert store.view().scores.tolist() == [10, 11, 12]
        assert store.begin_night("monday") == 0
        ids = store.append([make(0)])
        store.annotate("rm", "score", {ids[0]: 2.0})
        assert len(store) == 4
    again = TrajectoryStore.repair(path)
    assert (again.segments, again.lost_trajectories) == ((), 0)
    assert len(TrajectoryStore.open(path)) == 4


def test_repair_needs_a_store(scratch):
    with pytest.raises(StoreError, match="no trajectory store"):
        TrajectoryStore.repair(scratch / "nothing")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "bytes", "other"])
def test_a_damaged_manifest_falls_back_to_the_one_before_and_says_so(path, damage, make, caplog):
    newest = path / "manifest-00000004.json"
    content = newest.read_bytes()
    changed = {
        "flip": content.replace(b'"rows": 3', b'"rows": 4'),
        "cut": content[: len(content) // 2],
        "empty": b"",
        "bytes": b"\xff\xfe" * 20,
        "other": b"[1, 2]",
    }
    assert changed[damage] != content
    newest.write_bytes(changed[damage])
    lost = segment(path, 4)
    reader = TrajectoryStore.open(path)
    assert len(reader) == 10
    assert "fell back to generation 3 (manifest-00000004.json" in reader.recovery
    assert reader.recovery in caplog.text
    assert newest.exists()
    with TrajectoryStore.open(path, writable=True) as store:
        assert "generation 3" in store.recovery
        assert store.missing("rm", "score") == []
        # What the lost generation had written is set aside, not deleted.
        assert {file.name for file in (path / "quarantine").iterdir()} == {newest.name, lost.name}
        store.append([make(n) for n in range(10, 13)])
    with TrajectoryStore.open(path, writable=True) as store:
        assert store.recovery is None
        assert len(store) == 13
        assert (path / "quarantine" / lost.name).exists()


def test_the_generation_before_an_eviction_can_be_fallen_back_to(path):
    with TrajectoryStore.open(path, writable=True) as store:
        before = store.ids
        store.evict(capacity=2)
    (path / "manifest-00000005.json").write_text("torn")
    with TrajectoryStore.open(path, writable=True) as store:
        assert store.ids == before
        assert len(store.view().batch(range(13))) == 13


def test_a_reader_looks_again_when_every_manifest_it_saw_is_gone(path, monkeypatch):
    real, gone = manifest_files, [[path / "manifest-00000001.json"], []]
    monkeypatch.setattr("training.replay.manifest.manifest_files", lambda f: gone.pop() if gone else real(f))
    assert len(TrajectoryStore.open(path)) == 13


def test_a_second_fall_back_overwrites_nothing_in_quarantine(path, make):
    for _ in range(2):
        (path / "manifest-00000004.json").write_text("torn")
        with TrajectoryStore.open(path, writable=True) as store:
            store.append([make(n) for n in range(10, 13)])
    assert len(list((path / "quarantine").iterdir())) == 4


def test_an_interrupted_fall_back_is_still_one(path, monkeypatch):
    """Strays move before the damaged manifest does: dying in between must not turn them into garbage to delete."""
    (path / "manifest-00000004.json").write_text("torn")
    lost = segment(path, 4)

    def die(source, target):
        real(source, target)
        raise KeyboardInterrupt

    real = shutil.os.replace
    monkeypatch.setattr("training.replay.recovery.os.replace", die)
    with pytest.raises(KeyboardInterrupt):
        TrajectoryStore.open(path, writable=True)
    monkeypatch.undo()
    with TrajectoryStore.open(path, writable=True) as store:
        assert store.recovery is not None
    assert (path / "quarantine" / lost.name).exists()


def test_a_store_with_no_valid_manifest_is_an_error(path):
    for file in path.glob("manifest-*"):
        file.write_text("torn")
    for act in (TrajectoryStore.open, TrajectoryStore.repair):
        with pytest.raises(StoreError, match="no valid manifest") as caught:
            act(path)
        assert "manifest-00000003.json" in str(caught.value)
    assert segment(path, 2).exists()


def test_a_newer_format_is_an_error_not_damage(path):
    manifest = path / "manifest-00000004.json"
    body = json.loads(manifest.read_text())["body"] | {"format": 2}
    manifest.write_text(json.dumps({"body": body, "sha256": _digest(body)}))
    with pytest.raises(StoreError, match="format 2"):
        TrajectoryStore.open(path, writable=True)


def test_a_file_cut_under_an_open_store_is_named(scratch, make):
    with TrajectoryStore.open(scratch / "large", writable=True) as store:
        store.append([make(n, prompt_ids=range(30_000)) for n in range(8)])
        file = segment(scratch / "large", 1)
        with file.open("r+b") as stream:
            stream.truncate(256_000)
        rows = store._index.trajectories.segments[0]
        assert rows.row("prompt_ids", 0).tolist() == list(range(30_000))
        with pytest.raises(StoreError, match=f"{file.name}.*ends before"):
            rows.row("prompt_ids", 7)

"""A disk that refuses: what was committed is intact, and what could not be removed is only litter."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.training.replay.store_folder import assert_tidy
from training.errors import StoreError
from training.replay.store import TrajectoryStore


@pytest.fixture
def path(scratch):
    return scratch / "trajectories"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_said_and_loses_nothing(path, make, monkeypatch, call):
    with TrajectoryStore.open(path, writable=True) as store:
        ids = store.append([make(0)])
        real, calls = getattr(os, call), []

        def full(*arguments):
            calls.append(arguments)
            if len(calls) == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        monkeypatch.setattr(os, call, full)
        fail_at = 1  # while the segment is written: the store goes on
        with pytest.raises(StoreError, match="No space left") as caught:
            store.append([make(1)])
        assert "free disk space" in str(caught.value)
        assert store.ids == tuple(ids)
        assert not [file for file in (path / "segments").iterdir() if file.name.startswith(".")]
        ids += store.append([make(2)])
        calls.clear()
        fail_at = 3 if call == "fsync" else 2  # while the manifest is written: nobody knows whether it took effect
        with pytest.raises(StoreError, match="No space left"):
            store.append([make(3)])
        for act in (lambda: store.append([make(4)]), lambda: store.begin_night("x"), lambda: store.evict(capacity=0)):
            with pytest.raises(StoreError, match="an earlier write failed"):
                act()
    monkeypatch.undo()
    with TrajectoryStore.open(path, writable=True) as store:
        assert store.ids == tuple(ids)
        store.append([make(3)])
        assert len(store) == 3
    assert_tidy(path)


def test_old_files_that_cannot_be_removed_are_only_litter(path, make, monkeypatch, caplog):
    with TrajectoryStore.open(path, writable=True) as store:
        for number in range(3):
            store.append([make(number)])

        def stuck(file, missing_ok=False):
            if missing_ok and not file.exists():
                return
            raise PermissionError(errno.EPERM, "not permitted", str(file))

        monkeypatch.setattr(Path, "unlink", stuck)
        store.append([make(3)])
        assert len(store) == 4
        assert "cannot remove old files" in caplog.text
    monkeypatch.undo()
    with TrajectoryStore.open(path, writable=True) as store:
        assert len(store) == 4
        store.begin_night("next")
    assert_tidy(path)

"""The parent's sign of life goes on when the disk refuses it once."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from tasks.lease import renewed_lease
from training.contract import LEASE


def test_one_refused_touch_does_not_end_the_renewing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch, touches, renewed = Path.touch, [], threading.Event()

    def touching(file: Path) -> None:
        touches.append(file)
        if len(touches) == 2:  # the first of the thread
            raise OSError(errno.EIO, "the server of the shared disk is away")
        touch(file)
        if len(touches) > 2:
            renewed.set()

    monkeypatch.setattr(Path, "touch", touching)
    with renewed_lease(tmp_path, 0.04):
        assert renewed.wait(60)
    assert set(touches) == {tmp_path / LEASE}
    assert not (tmp_path / LEASE).exists()

"""Measurements that come at once: one at a time of a model, and never two in one directory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.measure import MeasurementAtWork, claim_directory, only_measurement


def test_one_at_a_time_of_a_model(tmp_path: Path) -> None:
    with only_measurement(tmp_path, "chat-policy"):
        with pytest.raises(MeasurementAtWork, match="chat-policy"), only_measurement(tmp_path, "chat-policy"):
            pass
        with only_measurement(tmp_path, "code-policy"):
            pass
    with only_measurement(tmp_path, "chat-policy"):
        pass


def test_every_measurement_has_a_directory_of_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_directory(tmp_path), range(40)))
    assert sorted(number for number, _ in claimed) == list(range(1, 41))
    assert all(directory.is_dir() for _, directory in claimed)


def test_a_number_is_not_given_twice_when_an_old_measurement_was_removed(tmp_path: Path) -> None:
    for _ in range(3):
        claim_directory(tmp_path)
    (tmp_path / "watch/measurement-00001").rmdir()
    assert claim_directory(tmp_path)[0] == 4

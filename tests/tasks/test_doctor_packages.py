"""DeepSpeed is asked for by those who run it, and by nobody else."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from configs.schema import load_config
from tasks.doctor import _packages

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)


@pytest.mark.parametrize(
    ("overrides", "health"),
    [
        ([], "good"),
        (["runtime.strategy=fsdp2", "runtime.nproc_per_node=2"], "good"),
        (["runtime.strategy=deepspeed", "runtime.nproc_per_node=2"], "bad"),
    ],
)
def test_deepspeed_is_missed_where_it_is_wanted(without_deepspeed, overrides, health):
    found = _packages(load_config(QUICKSTART, overrides))
    assert found.health == health
    assert ("missing: deepspeed" in found.sentence) == (health == "bad")

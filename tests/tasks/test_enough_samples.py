"""A night whose gate cannot pass for want of held-out samples is refused when its data are split."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from configs.schema import NightConfig
from tasks.enough_samples import check_samples
from training.data.snapshot import SnapshotManifest
from training.errors import DataError

REWARD = {"metric": "reward", "min": 0.0}
AGAINST_CHAMPION = {"name": "holds", "metric": "reward", "direction": "higher", "max_regression": 0.1, "min_n": 200}
PERPLEXITY = {"metric": "perplexity", "max": 9.0}


def config_of(*rules: dict) -> NightConfig:
    return NightConfig.model_validate(
        {
            "data": {"source": "d"},
            "models": {"base": "m", "max_prompt_length": 64, "max_response_length": 64},
            "gates": {"rules": list(rules)},
        }
    )


def snapshot_of(folder: Path, rows: dict[str, int]) -> Path:
    """A snapshot of so many rows, as far as its manifest tells."""
    manifest = SnapshotManifest("s", "e", rows, {}, "pairs", {})
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest)), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("rules", "rows", "has_champion", "words"),
    [
        ([REWARD], {"evaluation": 7}, False, "reward needs 30 samples, and 7 evaluation rows are held out"),
        ([REWARD], {"evaluation": 29}, True, "data.evaluation_fraction"),
        ([REWARD, PERPLEXITY], {"evaluation": 90, "validation": 3}, False, "perplexity needs 30 samples, and 3 valid"),
        ([REWARD, AGAINST_CHAMPION], {"evaluation": 90}, True, "holds needs 200 samples, and 90 evaluation rows"),
        ([REWARD], {}, False, "and 0 evaluation rows"),
    ],
)
def test_too_few_are_refused_by_name(
    tmp_path: Path, rules: list[dict], rows: dict, has_champion: bool, words: str
) -> None:
    with pytest.raises(DataError) as refused:
        check_samples(config_of(*rules), snapshot_of(tmp_path, rows), has_champion=has_champion)
    assert words in f"{refused.value.message} {refused.value.hint}"
    assert "nothing was trained, and the champion stays" in refused.value.message


@pytest.mark.parametrize(
    ("rules", "rows", "has_champion"),
    [
        ([REWARD], {"evaluation": 30}, False),
        ([REWARD | {"min_n": 7}], {"evaluation": 7}, False),
        ([REWARD, AGAINST_CHAMPION], {"evaluation": 90}, False),
        ([REWARD, PERPLEXITY | {"severity": "warn"}], {"evaluation": 90, "validation": 3}, True),
    ],
)
def test_what_could_pass_goes_on(tmp_path: Path, rules: list[dict], rows: dict, has_champion: bool) -> None:
    check_samples(config_of(*rules), snapshot_of(tmp_path, rows), has_champion=has_champion)

"""The smallest config, written down with changes, and what its reader refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from configs.schema import ConfigError, load_config

MINIMAL = {
    "data": {"source": "pairs.jsonl"},
    "models": {"base": "model", "max_prompt_length": 64, "max_response_length": 64},
    "gates": {"rules": [{"metric": "reward", "min": 0.0}]},
}


def written(folder: Path, **sections) -> Path:
    """The smallest config with these sections in place of its own, as a file."""
    path = folder / "night.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | sections), encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    """What the reader says when it refuses the file."""
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    return str(refused.value)

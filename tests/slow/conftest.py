"""The quickstart's first night up to its student reward model, stage by stage as `configs/quickstart.yaml` has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from configs.schema import NightConfig, load_config
from tests.training.stages import run_here, write_stage
from training.contract import StageResult
from training.data.ingest import ingest
from training.data.quickstart import deliver

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class QuickstartNight:
    """Stages that were really run: their results, and what later stages take in."""

    home: Path
    config: NightConfig
    inputs: dict[str, Path]
    results: dict[str, StageResult]


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> QuickstartNight:
    """validate, base, sft, reward, distill, annotate at full size: minutes, once a session."""
    home, config = tmp_path_factory.mktemp("quickstart"), load_config(ROOT / "configs" / "quickstart.yaml")
    assert config.data.quickstart is not None
    partition = deliver(home / "data", 0, config.data.quickstart, config.seed)
    ingested = ingest(config.data, home / "validation", seed=config.seed, source_uri=str(partition))
    inputs, results = {"snapshot": Path(ingested.snapshot.uri)}, {}

    def stage(name: str, role: str, takes: tuple[str, ...], **params: Any) -> Path:
        directory = write_stage(
            home / name, name, {key: inputs[key] for key in takes}, params, config.seed, **sections_of(config)
        )
        results[name] = run_here(directory, name)
        return Path(results[name].output(role).path)

    inputs["base"] = stage("base", "model", ("snapshot",))
    inputs["reference"] = stage("sft", "model", ("snapshot", "base"))
    inputs["teacher"] = stage("reward", "reward_model", ("snapshot", "reference"))
    inputs["reward_model"] = stage("distill", "reward_model", ("snapshot", "reference", "teacher"))
    scored = ("snapshot", "reference", "reward_model")
    inputs["view"] = stage("annotate", "view", scored, store=str(home / "store"), night_index=0)
    return QuickstartNight(home, config, inputs, results)


def sections_of(config: NightConfig) -> dict[str, Any]:
    """Every section that a training stage may ask for."""
    names = ("models", "sft", "reward", "distill", "rollout", "replay", "ppo", "guards", "evaluation")
    return {name: getattr(config, name) for name in names}



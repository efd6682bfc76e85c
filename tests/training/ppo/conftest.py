"""PPO loops on the tiny night, built as the stage builds them, in a folder of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.schema.base import Section
from configs.schema.guards import GuardsConfig
from configs.schema.models import ModelsConfig
from configs.schema.ppo import PPOConfig, ReplayConfig
from configs.schema.supervised import RewardConfig
from tests.training.conftest import store_params
from tests.training.stages import write_stage
from training.annotate import open_store
from training.context import StageContext
from training.contract import METRICS, read_json, read_spec
from training.ppo.actors import build_actors
from training.ppo.experience import Experience
from training.ppo.loop import PPOLoop
from training.ppo.stage import _build_parts
from training.recorder import Recorder
from training.scoring import build_scorer
from training.world import World

BuildLoop = Callable[..., PPOLoop]


def loop_of(directory: Path) -> PPOLoop:
    """What `training.ppo.stage.run` builds from a spec, not run yet."""
    context = StageContext(directory, read_spec(directory), Recorder(directory / METRICS))
    models, ppo = context.section("models", ModelsConfig), context.section("ppo", PPOConfig)
    actors = build_actors(context, models, ppo)
    reward_model = context.spec.inputs.get("reward_model")
    scorer = build_scorer(context.section("reward", RewardConfig), models, reward_model, actors.encoder.tokenizer)
    with open_store(context, actors.policy.backbone, writable=False) as store:
        view = store.view_from_manifest(read_json(context.input("view")))
    parts = _build_parts(context, actors, scorer, view, models, ppo, World())
    guards, replay = context.section("guards", GuardsConfig), context.section("replay", ReplayConfig)
    return PPOLoop(parts, ppo, replay, guards, context, ppo.checkpoint_every)


@pytest.fixture
def build_loop(tmp_path: Path, night: Path, ppo_inputs: dict[str, Path]) -> BuildLoop:
    """`build_loop(name, **sections)`: a fresh loop in a folder of that name; sections, inputs replace the tiny ones."""

    def build(name: str = "ppo", inputs: dict[str, Path] | None = None, **sections: Section) -> PPOLoop:
        return loop_of(write_stage(tmp_path / name, "ppo", inputs or ppo_inputs, store_params(night), **sections))

    return build


def experience(number: int, tokens: int = 3, **changes: object) -> Experience:
    """Answer `number`, always the same."""
    draws = np.random.default_rng(number)
    given = {
        "prompt_id": f"prompt-{number // 2}",
        "prompt_ids": (1, 5 + number % 50, 9),
        "response_ids": tuple(int(t) for t in draws.integers(3, 200, tokens)),
        "behavior_log_probs": -draws.random(tokens, dtype=np.float32),
        "ref_log_probs": -draws.random(tokens, dtype=np.float32),
        "score": float(number),
        "finished": True,
        "round": -1,
    }
    return Experience(**given | changes)

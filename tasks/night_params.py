"""The few settings that are worth a column when nights are compared; the whole config is an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPARED = (
    "seed",
    "models.base",
    "reward.kind",
    "reward.learning_rate",
    "distill.lora_rank",
    "distill.learning_rate",
    "rollout.n",
    "replay.filter",
    "replay.importance_mode",
    "ppo.rounds",
    "ppo.ppo_epochs",
    "ppo.ppo_mini_batch_size",
    "ppo.actor_lr",
    "ppo.critic_lr",
    "ppo.clip_ratio",
    "ppo.lora_rank",
    "ppo.kl_ctrl.kl_coef",
    "ppo.kl_ctrl.target_kl",
    "evaluation.prompts",
)


def compared_params(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key to value of the compared settings of a dumped NightConfig. Raises KeyError for a key that is gone."""
    return {key: str(_at(config, key)) for key in COMPARED}


def _at(config: Mapping[str, Any], dotted: str) -> Any:
    found: Any = config
    for part in dotted.split("."):
        found = found[part]
    return found

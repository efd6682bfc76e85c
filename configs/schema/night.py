"""One YAML file is one night: every section, and the rules between sections."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import Field, model_validator

from configs.schema.base import Section
from configs.schema.data import DataConfig
from configs.schema.evaluation import EvaluationConfig
from configs.schema.gates import GatesConfig
from configs.schema.guards import GuardsConfig
from configs.schema.models import QUICKSTART_BASE, ModelsConfig
from configs.schema.ppo import PPOConfig, ReplayConfig, RolloutConfig
from configs.schema.registry import RegistryConfig, WatchConfig
from configs.schema.runtime import RuntimeConfig
from configs.schema.supervised import DistillConfig, RewardConfig, SFTConfig

_OPERATIONAL_SECTIONS = ("runtime", "watch")
_OPERATIONAL_REGISTRY = (
    "reach_timeout_seconds",
    "lock_wait_seconds",
    "verify_timeout_minutes",
    "max_points",
    "retention_keep",
)


class NightConfig(Section):
    """The effective configuration of a night. Its hash is stored with every run."""

    name: Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "nightjar"
    """Name of the chain of nights, shown in Prefect and MLflow."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Root of every named random generator."""
    data: DataConfig
    """Where preferences come from, and what is refused."""
    models: ModelsConfig
    """Base models and length limits."""
    sft: SFTConfig = SFTConfig()
    """Supervised fine-tuning of the base."""
    reward: RewardConfig = RewardConfig()
    """The teacher reward model, or a function."""
    distill: DistillConfig = DistillConfig()
    """The student reward model."""
    rollout: RolloutConfig = RolloutConfig()
    """Fresh samples."""
    replay: ReplayConfig = ReplayConfig()
    """Stored trajectories."""
    ppo: PPOConfig = PPOConfig()
    """Actor-critic rounds."""
    guards: GuardsConfig = GuardsConfig()
    """Rules that watch training."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Measuring champion, challenger and reference."""
    gates: GatesConfig
    """Rules of promotion."""
    registry: RegistryConfig = RegistryConfig()
    """MLflow registry and tracking."""
    watch: WatchConfig = WatchConfig()
    """Re-measuring the champion later."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Processes and devices."""

    @model_validator(mode="after")
    def _sections_agree(self) -> NightConfig:
        if self.models.base == QUICKSTART_BASE and self.data.quickstart is None:
            raise ValueError(
                "models.base is `quickstart`, whose vocabulary only fits the quickstart data; "
                "write data.quickstart or name a base model folder"
            )
        if self.models.base == QUICKSTART_BASE and self.sft.run == "never":
            raise ValueError("the quickstart base is untrained: sft.run must be auto or always")
        longest = self.models.max_prompt_length + self.models.max_response_length
        row, pair = longest, self._longest_pair() if self.reward.kind == "model" else longest
        budgets = {
            "ppo.ppo_max_token_len": (self.ppo.ppo_max_token_len, row),
            "sft.max_tokens_per_microbatch": (self.sft.max_tokens_per_microbatch, row),
            "reward.max_tokens_per_microbatch": (self.reward.max_tokens_per_microbatch, pair),
            "distill.max_tokens_per_microbatch": (self.distill.max_tokens_per_microbatch, pair),
        }
        for key, (budget, needed) in budgets.items():
            if budget < needed:
                what = "one longest row" if needed == longest else "the longest pair, whose two rows go together"
                raise ValueError(
                    f"{key} is {budget}, less than {what} (models.max_prompt_length + models.max_response_length is "
                    f"{longest}); write at least {needed}"
                )
        return self

    def _longest_pair(self) -> int:
        """Tokens of a pair at its limits: two rows, or one in which both answers share the prompt."""
        prompt, response = self.models.max_prompt_length, self.models.max_response_length
        return prompt + 2 * response if self.models.layout == "shared" else 2 * (prompt + response)

    def canonical_json(self) -> str:
        """The effective config as JSON with sorted keys: what the hash is of."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)

    @property
    def config_hash(self) -> str:
        """sha256 of what decides a night's result: a night goes on under another time limit, on more retries or on
        another device, and other limits for the champion later are no new night either."""
        content = self.model_dump(mode="json")
        for section in _OPERATIONAL_SECTIONS:
            del content[section]
        for key in _OPERATIONAL_REGISTRY:
            del content["registry"][key]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

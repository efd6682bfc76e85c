"""Fresh answers from the current policy, annotated at once: log-probs as sampled, reference log-probs, reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from configs.schema.ppo import RolloutConfig
from training.annotate import response_log_probs
from training.examples import Prompt
from training.models.layout import Group
from training.models.sampling import Sample, SamplingSettings, sample_responses
from training.ppo.actors import Actors
from training.ppo.experience import Experience, pack, unpack
from training.scoring import Question, Scorer
from training.seeding import torch_generator
from training.world import World


class RolloutWorker:
    """Samples the training prompts a round at a time; each round's prompts and draws come from their own names."""

    def __init__(
        self, actors: Actors, scorer: Scorer, prompts: Sequence[Prompt], rollout: RolloutConfig, max_new_tokens: int,
        budget: int, seed: int, world: World,
    ) -> None:  # fmt: skip
        self.actors, self.scorer, self.prompts, self.rollout = actors, scorer, prompts, rollout
        self.budget, self.seed, self.world = budget, seed, world
        self.settings = SamplingSettings(
            max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.batch_size
        )

    def collect(self, round_index: int) -> list[Experience]:
        """n answers to each of the round's prompts, prompt by prompt."""
        generator = torch_generator(self.seed, f"ppo/prompts/round={round_index}")
        order = torch.randperm(len(self.prompts), generator=generator)[: self.rollout.prompts_per_round]
        chosen = [self.prompts[i] for i in order.tolist() for _ in range(self.rollout.n)]
        draws = torch_generator(self.seed, f"ppo/rollout/round={round_index}")
        token_ids = [prompt.token_ids for prompt in chosen]
        samples = sample_responses(self.actors.policy, token_ids, self.settings, draws, world=self.world)
        return self._agreed(self._annotated(chosen, samples, round_index))

    @torch.no_grad()
    def _annotated(self, prompts: Sequence[Prompt], samples: Sequence[Sample], round_index: int) -> list[Experience]:
        groups = [Group(p.token_ids, (s.token_ids,)) for p, s in zip(prompts, samples, strict=True)]
        reference = response_log_probs(self.actors.reference, groups, self.budget)
        scores = self.scorer.scores([Question(p, s.token_ids) for p, s in zip(prompts, samples, strict=True)])
        return [
            Experience(
                prompt.prompt_id, prompt.token_ids, sample.token_ids, np.asarray(sample.log_probs, dtype=np.float32),
                reference[i], float(scores[i]), sample.finished, round_index,
            )
            for i, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
        ]  # fmt: skip

    def _agreed(self, experiences: list[Experience]) -> list[Experience]:
        """With the main rank's scores and log-probs: they decide which answers are chosen, and their priorities."""
        if self.world.size == 1:
            return experiences
        return unpack({name: self.world.broadcast_(tensor) for name, tensor in pack(experiences).items()})

"""Making a round: which answers, what the old policy and critic say of them, and what they are worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from configs.schema.ppo import PPOConfig, ReplayConfig
from training.errors import StageError
from training.models.layout import Layout
from training.objectives import kl_penalty, masked_mean
from training.ppo.experience import Experience, ExperiencePool, RoundBatch, padded, response_mask
from training.ppo.probe import pass_log_probs_and_values, pass_values
from training.ppo.shaping import RewardScale, Share, clipped_share, estimate_advantages, shape_scores, td_errors
from training.ppo.update import Updater, round_weight_metrics
from training.replay.filter import preference_filter_weights
from training.replay.importance import importance_weights
from training.replay.prioritized import PrioritizedSampler
from training.seeding import torch_generator


@dataclass(frozen=True)
class Choice:
    """Answers of a round: pool indices [B] and the priority-bias weights [B]."""

    indices: list[int]
    weights: torch.Tensor


class RoundMaker:
    """Chapters 2 to 4 of the story: choose, fix the old policy, shape rewards and estimate advantages."""

    def __init__(
        self, pool: ExperiencePool, sampler: PrioritizedSampler, updater: Updater, ppo: PPOConfig, replay: ReplayConfig,
        scale: RewardScale, seed: int,
    ) -> None:  # fmt: skip
        self.pool, self.sampler, self.updater = pool, sampler, updater
        self.ppo, self.replay, self.scale, self.seed = ppo, replay, scale, seed

    def choose(self, round_index: int, fresh: np.ndarray) -> Choice:
        """Filter within prompts, then fill the round from tonight's answers and, by priority, from everything older."""
        weights = preference_filter_weights(
            torch.from_numpy(self.pool.scores()), self.pool.filter_groups(), self.replay.filter,
            self.replay.filter_power, torch_generator(self.seed, f"ppo/filter/round={round_index}"),
        ).numpy()  # fmt: skip
        chosen = self._choose_fresh(fresh, weights, round_index)
        older = weights.copy()
        older[fresh] = 0.0  # this round's answers are in already
        wanted = self.ppo.train_batch_size - len(chosen)
        if wanted <= 0 or not older.any():
            if not chosen:
                raise StageError("ppo: the filter leaves no answer to train on", "choose another replay.filter")
            return Choice(chosen, torch.ones(len(chosen)))
        slots, bias = self._draw(wanted, older, round_index)
        return Choice(chosen + slots, torch.cat([torch.ones(len(chosen)), bias]))

    def _choose_fresh(self, fresh: np.ndarray, weights: np.ndarray, round_index: int) -> list[int]:
        if not len(fresh):
            return []
        eligible = fresh[weights[fresh] > 0]
        share = self.ppo.train_batch_size * (1.0 - self.replay.stored_share)
        room = max(1, round(share)) if self.pool.num_stored else self.ppo.train_batch_size
        if len(eligible) <= room:
            return [int(i) for i in eligible]
        draws = torch_generator(self.seed, f"ppo/fresh/round={round_index}")
        picked = torch.multinomial(torch.from_numpy(weights[eligible]).double(), room, generator=draws)
        return [int(eligible[i]) for i in sorted(picked.tolist())]

    def _draw(self, wanted: int, weights: np.ndarray, round_index: int) -> tuple[list[int], torch.Tensor]:
        if self.replay.prioritized:
            slot_weights = np.zeros(self.sampler.capacity)
            slot_weights[: len(weights)] = weights
            slots, bias = self.sampler.sample(wanted, slot_weights)
            return slots.tolist(), torch.from_numpy(bias)
        draws = torch_generator(self.seed, f"ppo/draw/round={round_index}")
        picked = torch.multinomial(torch.from_numpy(weights).double(), wanted, replacement=True, generator=draws)
        return picked.tolist(), torch.ones(wanted)

    def clipped(self, fresh: np.ndarray, chosen: Sequence[int]) -> Share:
        """Share of clipped scores among this round's fresh answers, before any filter, as it was measured before the
        first step; a filter that prefers extremes would raise it. Or that of the stored ones, where it is larger."""
        stored = self.clipped_stored([i for i in chosen if i < self.pool.num_stored])
        if not len(fresh):
            return stored
        return max(Share(clipped_share(self.pool.scores()[fresh], self.ppo, self.scale), len(fresh)), stored)

    def clipped_stored(self, chosen: Sequence[int] = ()) -> Share:
        """Share of clipped scores in the whole store, plus what the `chosen` show beyond what is known of those very
        ones: what was damaged on its way into the round counts, and that priorities prefer extremes does not."""
        scores = self.pool.scores()[: self.pool.num_stored]
        whole, known = (clipped_share(some, self.ppo, self.scale) for some in (scores, scores[list(chosen)]))
        read = clipped_share([e.score for e in self.pool.take(list(chosen))], self.ppo, self.scale)
        return Share(min(1.0, whole + max(0.0, read - known)), len(scores))

    def make(self, choice: Choice, order: list[int], kl_coef: float) -> tuple[RoundBatch, dict[str, float]]:
        """The round's tensors and metrics. `order` is the first epoch's, so that the old log-probs come from exactly
        the microbatches that will be trained on first."""
        experiences = self.pool.take(choice.indices)
        mask = response_mask(experiences, max(len(e.response_ids) for e in experiences))
        old_log_probs, old_values = self._old_pass(experiences, order, mask)
        behavior = padded([e.behavior_log_probs for e in experiences], mask.shape[1])
        reference = padded([e.ref_log_probs for e in experiences], mask.shape[1])
        shaped = shape_scores(experiences, self.ppo, self.scale)
        found = estimate_advantages(shaped, old_log_probs, reference, old_values, mask, self.ppo, kl_coef)
        weights = self._weights(old_log_probs - behavior, mask) * choice.weights[:, None]
        batch = RoundBatch(
            torch.tensor(choice.indices), mask, behavior, reference, old_log_probs, old_values, found.rewards,
            found.advantages, found.returns, weights, shaped,
        )  # fmt: skip
        self.update_priorities(batch, old_values)
        metrics = {
            "reward_mean": float(shaped.mean()),
            "reward_raw_mean": float(np.mean([e.score for e in experiences])),
            "advantage_variance": found.variance,
            "reward_kl": found.reward_kl,
            "fresh_share": float(np.mean([e.round >= 0 for e in experiences])),
            "value_mean": float(masked_mean(old_values, mask)),
        }
        recorded = torch.tensor([e.recorded for e in experiences])
        drift = behavior_drift(behavior, old_log_probs, mask, recorded)
        return batch, metrics | drift | round_weight_metrics(weights, mask)

    def _weights(self, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not self.replay.importance_weights:
            return mask.float()
        return importance_weights(
            log_ratio, mask, level=self.replay.importance_level, mode=self.replay.importance_mode,
            threshold=self.replay.importance_threshold,
            clip_to=self.replay.importance_clip_to if self.replay.importance_mode == "clip_to" else None,
        )  # fmt: skip

    def _old_pass(
        self, experiences: list[Experience], order: list[int], mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, values = torch.zeros(mask.shape), torch.zeros(mask.shape)
        for rows, layout in self._microbatches(experiences, order):
            width = layout.response_mask.shape[1]
            found = pass_log_probs_and_values(self.updater.actors, layout)
            log_probs[rows, :width], values[rows, :width] = found
        world = self.updater.world
        return world.broadcast_(log_probs), world.broadcast_(values)

    def _microbatches(self, experiences: list[Experience], order: list[int]) -> Iterator[tuple[torch.Tensor, Layout]]:
        """Rows of the round and their layout, in the microbatches that an epoch in this order trains on."""
        for rows in minibatch_rows(order, self.ppo.ppo_mini_batch_size):
            batch = self.updater.minibatch(rows, experiences)
            for piece in self.updater.microbatches(batch):
                yield torch.tensor([rows[i] for i in piece]), self.updater.layout([batch.experiences[i] for i in piece])

    def update_priorities(self, batch: RoundBatch, values: torch.Tensor) -> None:
        """Priorities of the round's answers from their TD errors under these values."""
        errors = td_errors(batch.rewards, values, batch.response_mask, self.ppo.gamma)
        errors = self.updater.world.broadcast_(errors)  # ranks whose priorities differ would draw other answers
        if torch.isfinite(errors).all():
            self.sampler.update(batch.indices.numpy(), errors.numpy())

    def refresh(self, batch: RoundBatch) -> None:
        """Recompute the TD errors of the round's answers with the critic as it is now; the policy is not asked.

        Others have no rewards to hold it against: these are made of the policy at a round's start. They keep what the
        last round that they were in has found.
        """
        experiences, values = self.pool.take(batch.indices.tolist()), torch.zeros(batch.response_mask.shape)
        for rows, layout in self._microbatches(experiences, list(range(len(experiences)))):
            values[rows, : layout.response_mask.shape[1]] = pass_values(self.updater.actors, layout)
        self.update_priorities(batch, values)


def behavior_drift(
    behavior_log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor, recorded: torch.Tensor
) -> dict[str, float]:
    """KL(writer || old policy), nats a token, by k3 with r = old / writer: never negative, however few the tokens.

    `kl_behavior` over answers whose writer's log-probs were `recorded` [B], `kl_behavior_estimated` over those that the
    reference stands in for: it did not write them, so that their mean is a distance, but no estimate of a KL. What the
    round has no answer of is left out.
    """
    k3 = kl_penalty(behavior_log_probs, old_log_probs, "k3")
    kinds = {"kl_behavior": mask & recorded[:, None], "kl_behavior_estimated": mask & ~recorded[:, None]}
    return {name: float(masked_mean(k3, kind)) for name, kind in kinds.items() if kind.any()}


def minibatch_rows(order: list[int], size: int) -> list[list[int]]:
    """Consecutive minibatches of an epoch's order; the last one may be smaller."""
    return [order[start : start + size] for start in range(0, len(order), size)]

"""One optimiser step of the actor and of the critic, on one minibatch, in microbatches that never exceed the budget."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.schema.ppo import PPOConfig
from training.engine import Engine, StepReport
from training.errors import StageError
from training.metrics import Mean, MeanTable
from training.models.batching import microbatches
from training.models.layout import Layout, build_layout, group_sizes
from training.models.tokenize import pad_id
from training.objectives import aggregate, kl_penalty, policy_loss, value_fit, value_loss
from training.objectives.policy_loss import PolicyLoss
from training.objectives.value_fit import ValueFit
from training.ppo.actors import Actors
from training.ppo.experience import Experience, RoundBatch
from training.replay.importance import effective_sample_fraction, importance_weights
from training.world import Turn, World


@dataclass
class UpdateSettings:
    """What an update needs beside the config; `clip_ratio_*` start at the config's and may be lowered by a guard."""

    clip_ratio_low: float
    clip_ratio_high: float
    train_policy: bool = True
    first_of_round: int | None = None
    """The round whose first minibatch this is: the policy has not moved yet, so that every ratio must be 1."""


@dataclass(frozen=True)
class MiniBatch:
    """Rows of the round, their answers, and the counts that the losses of all its microbatches are divided by."""

    rows: list[int]
    experiences: Sequence[Experience]
    num_tokens: int

    @property
    def num_sequences(self) -> int:
        """Answers."""
        return len(self.rows)


MEAN_GAP, LARGEST_GAP, LARGEST_GAP_HALF = 1e-4, 1e-5, 1e-2
"""Of |ratio - 1| in a round's first minibatch: the mean over tokens, the largest one in float32 and in narrower types.
Old pass and update read the same layout in the same mode, and on the CPU every token's is 0.0. The room left is that of
a log-prob's last bits, and in narrower types that of kernels which differ between passes with and without gradients."""


class Updater:
    """Runs forward and backward passes over minibatches; holds no state beside the engines'."""

    def __init__(
        self, actors: Actors, actor: Engine, critic: Engine, ppo: PPOConfig, world: World, layout: str = "padded"
    ) -> None:
        self.actors, self.actor, self.critic, self.ppo, self.world = actors, actor, critic, ppo, world
        self._layout = layout
        self._pad = pad_id(actors.policy.backbone.tokenizer)

    def minibatch(self, rows: list[int], round_experiences: Sequence[Experience]) -> MiniBatch:
        """The minibatch of these rows of the round."""
        chosen = [round_experiences[i] for i in rows]
        return MiniBatch(rows, chosen, sum(len(e.response_ids) for e in chosen))

    def microbatches(self, batch: MiniBatch) -> list[list[int]]:
        """Positions within the minibatch; the split depends on lengths alone, so that every pass has the same one."""
        sizes = group_sizes([e.group for e in batch.experiences], self._layout)
        most = None if self.ppo.use_dynamic_bsz else self.ppo.ppo_micro_batch_size
        return microbatches(sizes, self.ppo.ppo_max_token_len, [e.prompt_id for e in batch.experiences], most)

    def layout(self, experiences: Sequence[Experience]) -> Layout:
        """The tensors of one forward."""
        return build_layout([e.group for e in experiences], self._layout, self._pad).to(self.actors.device)

    def step(self, batch: MiniBatch, data: RoundBatch, settings: UpdateSettings) -> dict[str, float]:
        """Update actor (unless it is warming up) and critic; returns the step's metrics."""
        started = time.perf_counter()
        table, fit, gap = MeanTable(), None, 0.0
        pieces = self.microbatches(batch)
        for turn in self.world.turns(pieces):
            layout = self.layout([batch.experiences[i] for i in turn.items])
            rows = torch.tensor([batch.rows[i] for i in turn.items])
            if settings.train_policy:
                means, off = self._actor_pass(layout, rows, data, batch, settings, turn)
                gap = max(gap, off)
            else:  # the policy stands still, so what it says now is what it said at the round's start
                old = data.old_log_probs[rows, : layout.response_mask.shape[1]].to(self.actors.device)
                means = self._drift(old, rows, data, layout.response_mask, batch)
            critic_means, part = self._critic_pass(layout, rows, data, batch, turn)
            if turn.counts:
                table.add(means | critic_means)
                fit = part if fit is None else fit.merge(part)
        metrics = table.reduce(self.world)
        if settings.train_policy:
            metrics["ratio_gap_max"] = max(self.world.gather(gap))
            self._demand_ratio_one(metrics, settings.first_of_round)
        metrics |= self._apply(metrics, settings)
        ranks = self.world.gather([_plain(fit), time.perf_counter() - started])
        fits = [ValueFit(*map(torch.tensor, plain)) for plain, _ in ranks if plain is not None]
        metrics["explained_variance"] = float(functools.reduce(ValueFit.merge, fits).explained_variance())
        metrics |= response_lengths(batch)
        metrics["tokens_per_second"] = batch.num_tokens / max(1e-9, *(seconds for _, seconds in ranks))
        return self.world.broadcast(metrics)

    def _actor_pass(
        self, layout: Layout, rows: torch.Tensor, data: RoundBatch, batch: MiniBatch, settings: UpdateSettings,
        turn: Turn,
    ) -> tuple[dict[str, Mean], float]:  # fmt: skip
        ppo, mask, width = self.ppo, layout.response_mask, layout.response_mask.shape[1]

        def piece(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows, :width].to(mask.device)

        log_probs, entropy = self.actors.policy.log_probs_and_entropy(layout)
        old, reference = piece(data.old_log_probs), piece(data.ref_log_probs)
        counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
        found = policy_loss(
            log_probs, old, piece(data.advantages), mask, clip_ratio_low=settings.clip_ratio_low,
            clip_ratio_high=settings.clip_ratio_high, clip_ratio_c=ppo.clip_ratio_c, weights=piece(data.weights),
            loss_agg_mode=ppo.loss_agg_mode, **counts,
        )  # fmt: skip
        loss = found.loss
        if ppo.use_kl_loss:
            loss = loss + ppo.kl_loss_coef * aggregate(
                kl_penalty(log_probs, reference, ppo.kl_loss_type), mask, ppo.loss_agg_mode, **counts
            )
        if ppo.entropy_coeff > 0:
            loss = loss - ppo.entropy_coeff * aggregate(entropy, mask, ppo.loss_agg_mode, **counts)
        self.actor.backward(loss, turn)
        return self._actor_metrics(found, loss, log_probs.detach(), entropy.detach(), rows, data, mask, batch)

    def _actor_metrics(
        self, found: PolicyLoss, loss: torch.Tensor, log_probs: torch.Tensor, entropy: torch.Tensor, rows: torch.Tensor,
        data: RoundBatch, mask: torch.Tensor, batch: MiniBatch,
    ) -> tuple[dict[str, Mean], float]:  # fmt: skip
        """Means over tokens, and the largest |ratio - 1| of one."""
        share = share_of(mask, batch)
        old = data.old_log_probs[rows, : mask.shape[1]].to(mask.device)
        ratio = torch.exp((log_probs - old).clamp(-20, 20))
        gaps = torch.where(mask, (ratio - 1).abs(), 0.0)
        means = {
            "policy_loss": Mean(float(found.loss.detach()), share), "actor_loss": Mean(float(loss.detach()), share),
            "clip_frac": Mean(float(found.clip_frac), share),
            "clip_frac_lower": Mean(float(found.clip_frac_lower), share),
            "approx_kl": Mean(float(found.approx_kl), share), "entropy": token_mean(entropy, mask, batch),
            "ratio_mean": token_mean(ratio, mask, batch), "ratio_gap": token_mean(gaps, mask, batch),
        }  # fmt: skip
        return means | self._drift(log_probs, rows, data, mask, batch), float(gaps.max())

    def _drift(
        self, log_probs: torch.Tensor, rows: torch.Tensor, data: RoundBatch, mask: torch.Tensor, batch: MiniBatch
    ) -> dict[str, Mean]:
        behavior, reference = (
            tensor[rows, : mask.shape[1]].to(mask.device) for tensor in (data.behavior_log_probs, data.ref_log_probs)
        )
        return {"kl_ref_offpolicy": token_mean(offpolicy_kl(log_probs, behavior, reference, mask), mask, batch)}

    def _critic_pass(
        self, layout: Layout, rows: torch.Tensor, data: RoundBatch, batch: MiniBatch, turn: Turn
    ) -> tuple[dict[str, Mean], ValueFit]:
        mask, width = layout.response_mask, layout.response_mask.shape[1]
        values = self.actors.critic.values(layout)
        returns = data.returns[rows, :width].to(mask.device)
        found = value_loss(
            values, data.old_values[rows, :width].to(mask.device), returns, mask,
            cliprange_value=self.ppo.cliprange_value, weights=data.weights[rows, :width].to(mask.device),
            num_tokens=batch.num_tokens, num_sequences=batch.num_sequences,
        )  # fmt: skip
        self.critic.backward(found.loss, turn)
        share = share_of(mask, batch)
        means = {
            "value_loss": Mean(float(found.loss.detach()), share),
            "value_clip_frac": Mean(float(found.clip_frac), share),
        }  # fmt: skip
        return means, value_fit(values.detach(), returns, mask)

    def _demand_ratio_one(self, metrics: dict[str, float], first_of_round: int | None) -> None:
        """Before anything is learnt from the minibatch. What is not finite is the business of whoever applies."""
        wide = self.actors.policy.backbone.base.dtype == torch.float32
        largest = LARGEST_GAP if wide else LARGEST_GAP_HALF
        wrong = metrics["ratio_gap"] > MEAN_GAP or metrics["ratio_gap_max"] > largest
        if first_of_round is not None and wrong:
            raise StageError(
                f"ppo: the first minibatch of round {first_of_round} has ratio {metrics['ratio_mean']}, not 1 (off by "
                f"up to {metrics['ratio_gap_max']:.2e} at a token, by {metrics['ratio_gap']:.2e} on average)"
            )

    def _apply(self, metrics: dict[str, float], settings: UpdateSettings) -> dict[str, float]:
        finite = math.isfinite(metrics["value_loss"]) and math.isfinite(metrics.get("actor_loss", 0.0))
        # Both norms first: a step that one of the two cannot take is taken by neither.
        norms = [
            engine.prepare() for engine in ((self.critic, self.actor) if settings.train_policy else (self.critic,))
        ]
        finite = finite and all(map(math.isfinite, norms))
        critic = self.critic.step(loss_is_finite=finite)
        actor = self.actor.step(loss_is_finite=finite) if settings.train_policy else StepReport(0.0, 0.0, False)
        applied = critic.applied and (actor.applied or not settings.train_policy)
        found = {
            "critic_grad_norm": critic.grad_norm, "critic_learning_rate": critic.learning_rate,
            "applied": float(applied), "loss": metrics["value_loss"] + metrics.get("actor_loss", 0.0),
        }  # fmt: skip
        if settings.train_policy:
            found |= {"grad_norm": actor.grad_norm, "learning_rate": actor.learning_rate}
        return found


def _plain(fit: ValueFit | None) -> list[float] | None:
    """A fit as JSON; the same float32 numbers come back."""
    return None if fit is None else [float(value) for value in vars(fit).values()]


def response_lengths(batch: MiniBatch) -> dict[str, float]:
    """Tokens of the minibatch's answers; every rank has the whole minibatch."""
    longest = max(len(e.response_ids) for e in batch.experiences)
    return {"response_length/mean": batch.num_tokens / batch.num_sequences, "response_length/max": float(longest)}


def token_mean(x: torch.Tensor, mask: torch.Tensor, batch: MiniBatch) -> Mean:
    """A microbatch's part of the mean over the whole minibatch's tokens."""
    return Mean(float(torch.where(mask, x, 0.0).double().sum()) / batch.num_tokens, share_of(mask, batch))


def share_of(mask: torch.Tensor, batch: MiniBatch) -> float:
    """What a microbatch counts in metrics that are divided by the minibatch's counts already: shares add up to 1."""
    return mask.shape[0] / batch.num_sequences


def offpolicy_kl(
    log_probs: torch.Tensor, behavior: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """[B, R] k3 to the reference on stored tokens, weighted by policy / writer, truncated at 2: never negative."""
    weights = importance_weights(log_probs - behavior, mask, level="token", mode="truncate", threshold=2.0)
    return weights * torch.where(mask, kl_penalty(log_probs, reference, "k3"), 0.0)


def round_weight_metrics(weights: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """What the weights leave of the round."""
    per_answer = torch.where(mask, weights, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return {
        "effective_sample_fraction": float(effective_sample_fraction(per_answer)),
        "importance_weight_mean": float(per_answer.mean()),
    }

"""Looking at the policy from outside its training data: real KL, held-out reward, lengths, perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from configs.schema.ppo import PPOConfig
from training.examples import Prompt
from training.models.batching import microbatches
from training.models.layout import Group, Layout, build_layout, group_sizes
from training.models.network import Network
from training.models.sampling import SamplingSettings, sample_responses
from training.models.tokenize import pad_id
from training.ppo.actors import Actors
from training.recorder import Told, untold
from training.scoring import Question, Scorer
from training.seeding import torch_generator
from training.sft import negative_log_likelihood
from training.world import World


@dataclass(frozen=True)
class Probe:
    """Held-out prompts answered by the current policy.

    `kl_ref`: KL(policy || reference), nats a token, summed over the whole vocabulary at the policy's own samples;
    `kl_ref_sequence`: the same summed over each answer, mean over answers. `heldout_reward` is in normalised units.
    `scores`: those of the single answers, in the reward's own units.
    """

    kl_ref: float
    kl_ref_sequence: float
    heldout_reward: float
    response_length: float
    eos_rate: float
    scores: tuple[float, ...] = ()

    def metrics(self) -> dict[str, float]:
        """As step metrics."""
        return {name: getattr(self, name) for name in self.measured()}

    @classmethod
    def measured(cls) -> list[str]:
        """Names of its metrics."""
        return [field.name for field in fields(cls) if field.name != "scores"]


class Prober:
    """Measures with the same prompts and random numbers every time, so that probes differ by the policy alone."""

    def __init__(
        self,
        actors: Actors,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        held_out: Sequence[Group],
        budget: int,
        seed: int,
        world: World,
    ) -> None:
        self.actors, self.scorer, self.prompts, self.held_out = actors, scorer, prompts, held_out
        self.settings, self.budget, self.seed, self.world = settings, budget, seed, world

    def measure(self, limit: int) -> Probe:
        """Probe with the first `limit` prompts."""
        prompts = self.prompts[:limit]
        draws, token_ids = torch_generator(self.seed, "ppo/probe"), [prompt.token_ids for prompt in prompts]
        samples = sample_responses(self.actors.policy, token_ids, self.settings, draws, world=self.world)
        groups = [Group(p.token_ids, (s.token_ids,)) for p, s in zip(prompts, samples, strict=True)]
        token_mean, sequence_mean = exact_kl(self.actors.policy, self.actors.reference, groups, self.budget)
        scores = self.scorer.scores([Question(p, s.token_ids) for p, s in zip(prompts, samples, strict=True)])
        found = Probe(
            kl_ref=token_mean,
            kl_ref_sequence=sequence_mean,
            heldout_reward=(float(scores.mean()) - self.scorer.mean) / max(self.scorer.std, 1e-6),
            response_length=sum(len(s.token_ids) for s in samples) / len(samples),
            eos_rate=sum(s.finished for s in samples) / len(samples),
            scores=tuple(scores.tolist()),
        )
        agreed = self.world.broadcast(vars(found))
        return Probe(**agreed | {"scores": tuple(agreed["scores"])})

    def perplexity(self) -> dict[str, float]:
        """The policy's, on held-out texts, as a metric; nothing where there are none."""
        if not self.held_out:
            return {}
        return self.world.broadcast({"perplexity": perplexity(self.actors.policy, self.held_out, self.budget)})


def exact_kl(policy: Network, reference: Network, groups: Sequence[Group], budget: int) -> tuple[float, float]:
    """KL(policy || reference) at the given answers, summed over the vocabulary: (mean a token, mean a sequence), nats.

    With answers sampled from the policy this is the Rao-Blackwellised estimate of the KL: unbiased, never negative,
    and of less variance than log-ratios of the sampled tokens.
    """
    sums = sequence_kl(policy, reference, groups, budget)
    tokens = sum(len(group.responses[0]) for group in groups)
    return sum(sums) / max(tokens, 1), sum(sums) / max(len(groups), 1)


@torch.no_grad()
def sequence_kl(
    policy: Network, reference: Network, groups: Sequence[Group], budget: int, told: Told = untold
) -> list[float]:
    """KL summed over vocabulary and tokens of each group's one answer, nats, in order. `told` counts groups."""
    found, done = [0.0] * len(groups), 0
    for batch in microbatches(group_sizes(groups, "padded"), budget):
        layout = build_layout([groups[i] for i in batch], "padded", pad_id(policy.backbone.tokenizer))
        layout = layout.to(policy.backbone.device)
        sums = token_kl(policy, reference, layout).double().sum(dim=1).tolist()
        for i, value in zip(batch, sums, strict=True):
            found[i] = value
        done += len(batch)
        told(done)
    return found


@torch.no_grad()
def token_kl(policy: Network, reference: Network, layout: Layout) -> torch.Tensor:
    """[B, R] KL over the vocabulary at each response position, 0 in masked slots; row by row, to keep memory small."""
    ours, theirs = policy.hidden(layout)[:, :-1], reference.hidden(layout)[:, :-1]

    def rows() -> list[torch.Tensor]:
        found = []
        for hidden, ref_hidden in zip(ours, theirs, strict=True):
            log_p = policy.backbone.logits(hidden).float().log_softmax(dim=-1)
            log_q = reference.backbone.logits(ref_hidden).float().log_softmax(dim=-1)
            found.append((log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp(min=0.0))
        return found

    # One reading of both: an output layer that is spread over ranks is not gathered again for every row.
    found = policy.backbone.read(lambda: reference.backbone.read(rows))
    return torch.where(layout.response_mask, torch.stack(found), 0.0)


def perplexity(policy: Network, groups: Sequence[Group], budget: int) -> float:
    """exp of the mean negative log-likelihood of held-out chosen responses."""
    return math.exp(min(negative_log_likelihood(policy, groups, budget), 700.0))


@torch.no_grad()
def pass_log_probs_and_values(actors: Actors, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The no-gradient pass at a round's start: old log-probs and old values, [B, R] on the CPU."""
    return actors.policy.log_probs(layout).float().cpu(), pass_values(actors, layout)


@torch.no_grad()
def pass_values(actors: Actors, layout: Layout) -> torch.Tensor:
    """What the critic says now, [B, R] on the CPU."""
    return actors.critic.values(layout).float().cpu()


def selection_score(probe: Probe, ppo: PPOConfig) -> float:
    """What decides which round is handed on: held-out reward minus the price of drift."""
    return probe.heldout_reward - ppo.selection_kl_cost * probe.kl_ref

"""From scores to advantages: normalise, clip, penalise, place on tokens, subtract KL, estimate, whiten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from configs.schema.ppo import PPOConfig
from training.objectives import gae, kl_penalty, masked_mean, masked_var, masked_whiten, token_level_rewards
from training.ppo.experience import Experience


@dataclass(frozen=True)
class RewardScale:
    """Mean and spread of the reward model's scores on held-out answers, and the response limit in tokens."""

    mean: float
    std: float
    max_response_length: int


def shape_scores(experiences: Sequence[Experience], ppo: PPOConfig, scale: RewardScale) -> torch.Tensor:
    """[B] scores as PPO sees them: normalised, clipped, minus what an unended or overlong answer costs."""
    scores = torch.tensor([e.score for e in experiences], dtype=torch.float32)
    if ppo.normalize_reward:
        scores = (scores - scale.mean) / max(scale.std, 1e-6)
    if ppo.reward_clip is not None:
        scores = scores.clamp(-ppo.reward_clip, ppo.reward_clip)
    unfinished = torch.tensor([not e.finished for e in experiences])
    lengths = torch.tensor([len(e.response_ids) for e in experiences], dtype=torch.float32)
    return scores - ppo.missing_eos_penalty * unfinished - overlong(lengths, ppo, scale.max_response_length)


class Share(NamedTuple):
    """A share, and the answers that it was counted on."""

    value: float
    answers: int


def clipped_share(raw_scores: ArrayLike, ppo: PPOConfig, scale: RewardScale) -> float:
    """Share of the scores that lie beyond the clip: near 0, unless they are damaged or say nothing more."""
    scores = np.asarray(raw_scores, dtype=np.float64)
    if ppo.reward_clip is None or not scores.size:
        return 0.0
    if ppo.normalize_reward:
        scores = (scores - scale.mean) / max(scale.std, 1e-6)
    return float((np.abs(scores) > ppo.reward_clip).mean())


def overlong(lengths: torch.Tensor, ppo: PPOConfig, limit: int) -> torch.Tensor:
    """A penalty rising linearly over the last `overlong_buffer` tokens before the limit (Yu et al. 2025, eq. 13)."""
    if ppo.overlong_buffer == 0:
        return torch.zeros_like(lengths)
    excess = (lengths - (limit - ppo.overlong_buffer)) / ppo.overlong_buffer
    return ppo.overlong_penalty * excess.clamp(0.0, 1.0)


@dataclass(frozen=True)
class Advantages:
    """[B, R] each. `variance` is that of the advantages before whitening."""

    rewards: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    variance: float
    reward_kl: float


def estimate_advantages(
    shaped_scores: torch.Tensor, old_log_probs: torch.Tensor, ref_log_probs: torch.Tensor, old_values: torch.Tensor,
    mask: torch.Tensor, ppo: PPOConfig, kl_coef: float,
) -> Advantages:  # fmt: skip
    """Rewards with KL, GAE, and whitening once over the whole round."""
    kl = kl_penalty(old_log_probs, ref_log_probs, ppo.kl_penalty)
    used = kl if ppo.use_kl_in_reward else None
    rewards = token_level_rewards(shaped_scores, mask, used, kl_coef if ppo.use_kl_in_reward else 0.0)
    advantages, returns = gae(rewards, old_values, mask, ppo.gamma, ppo.lam)
    return Advantages(
        rewards, masked_whiten(advantages, mask), returns,
        float(masked_var(advantages, mask)), float(masked_mean(kl, mask)),
    )  # fmt: skip


def td_errors(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """[B] mean |r + gamma V' - V| over each answer's tokens: what priorities are made of."""
    following = torch.zeros_like(values)
    following[:, :-1] = values[:, 1:]
    delta = torch.where(mask, rewards + gamma * following - values, torch.zeros(()))
    return masked_mean(delta.abs(), mask, dim=1)

"""Ten seeded steps of a whole PPO objective on a table of logits: the pieces together, pinned.

The laws say that each piece is right; this curve says that nobody changed what they do together. When it moves on
purpose, print `train()`, pin it anew and say why in the commit.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.training.objectives.cases import bools, normal, ragged_mask, tensor
from training.objectives import (
    aggregate,
    gae,
    kl_penalty,
    masked_whiten,
    policy_loss,
    token_entropy,
    token_level_rewards,
    token_log_probs,
    value_loss,
)

PINNED: list[tuple[float, float, float]] = [
    (-2.270653e-08, 0.1541106, 0.004261725),
    (-0.07671338, 0.1261541, 0.01132969),
    (-0.1030013, 0.103269, 0.01551145),
    (-0.1225672, 0.08453537, 0.02041927),
    (-0.1301283, 0.0732336, 0.02482225),
    (-0.1325278, 0.07099181, 0.02725615),
    (-0.1327158, 0.06915671, 0.02732323),
    (-0.132906, 0.06765449, 0.02701629),
    (-0.1330515, 0.06642479, 0.02673513),
    (-0.1332903, 0.06541816, 0.02704801),
]


def train() -> list[tuple[float, float, float]]:
    """(policy loss, value loss, mean k3 to the reference) of each step; plain gradient descent on logits and values."""
    rng = np.random.default_rng(20)
    rows, columns, vocabulary = 6, 7, 11
    mask = bools(ragged_mask(rng, rows, columns))
    labels = torch.tensor(rng.integers(0, vocabulary, (rows, columns)))
    logits = tensor(normal(rng, rows, columns, vocabulary), requires_grad=True)
    values = tensor(normal(rng, rows, columns, scale=0.1), requires_grad=True)
    scores = tensor(normal(rng, rows))
    old_log_probs, old_values = token_log_probs(logits, labels).detach(), values.detach().clone()
    ref_log_probs = old_log_probs + tensor(normal(rng, rows, columns, scale=0.1))
    penalty = kl_penalty(old_log_probs, ref_log_probs, "k1")
    advantages, returns = gae(token_level_rewards(scores, mask, penalty, 0.1), old_values, mask, 1.0, 0.95)
    advantages = masked_whiten(advantages, mask)

    curve = []
    for _ in range(10):
        log_probs = token_log_probs(logits, labels)
        policy = policy_loss(log_probs, old_log_probs, advantages, mask)
        value = value_loss(values, old_values, returns, mask)
        kl = aggregate(kl_penalty(log_probs, ref_log_probs, "k3+"), mask, "token-mean")
        entropy = aggregate(token_entropy(logits), mask, "token-mean")
        loss = policy.loss + value.loss + 0.1 * kl - 0.01 * entropy
        slopes = torch.autograd.grad(loss, (logits, values))
        with torch.no_grad():
            logits -= 2.0 * slopes[0]
            values -= 2.0 * slopes[1]
        curve.append((float(policy.loss.detach()), float(value.loss.detach()), float(kl.detach())))
    return curve


def test_ten_steps() -> None:
    curve = train()
    assert len(curve) == len(PINNED) == 10
    for step, (actual, pinned) in enumerate(zip(curve, PINNED, strict=True)):
        assert actual == pytest.approx(pinned, rel=1e-4, abs=1e-6), f"step {step}"


def test_the_curve_goes_the_right_way() -> None:
    policy, value, _ = zip(*train(), strict=True)
    assert policy[0] == pytest.approx(0.0, abs=1e-6)  # ratio 1 and whitened advantages
    assert all(later < earlier for earlier, later in pairwise(policy))
    assert all(later < earlier for earlier, later in pairwise(value))

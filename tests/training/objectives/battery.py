"""The oracle checks, each a function of the implementation it judges.

`test_objectives_battery.py` runs them on the package; `test_objectives_mutants.py` runs them on copies with a planted
bug and asks that they fail. A check therefore reaches everything through `api`, never through an import of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.training.objectives import battery_losses, oracles
from tests.training.objectives.cases import (
    MODES,
    Batch,
    batch,
    bools,
    close,
    gradient,
    normal,
    poisoned,
    ragged_mask,
    tensor,
)

KINDS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")


def check_masked_statistics(api: Any) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        mask = ragged_mask(rng, 4, 6)
        x = poisoned(rng, normal(rng, 4, 6, scale=3.0) + 5.0, mask)
        leaf = tensor(x, requires_grad=True)
        close(api.masked_mean(leaf, bools(mask)), oracles.masked_mean(x, mask))
        for unbiased in (True, False):
            close(api.masked_var(leaf, bools(mask), unbiased), oracles.masked_var(x, mask, unbiased))
        for dim, axis in ((0, 0), (-1, 1)):
            rows = np.moveaxis(x, axis, -1), np.moveaxis(mask, axis, -1)
            expected = [oracles.masked_mean(row, keep) for row, keep in zip(*rows, strict=True)]
            close(api.masked_mean(leaf, bools(mask), dim), expected)
        direction = normal(rng, 4, 6)
        for shift_mean in (True, False):
            whitened = api.masked_whiten(leaf, bools(mask), shift_mean)
            close(whitened, oracles.masked_whiten(x, mask, shift_mean))
            leaf.grad = None
            (whitened * tensor(direction)).sum().backward()

            def projected(at: oracles.Floats, mask=mask, shift=shift_mean, direction=direction) -> float:
                return float((oracles.masked_whiten(at, mask, shift) * direction).sum())

            close(gradient(leaf), oracles.numerical_gradient(projected, x, mask), atol=1e-5)


def check_token_log_probs(api: Any) -> None:
    for seed, shape, temperature in ((0, (2, 5, 11), 1.0), (1, (3, 4), 0.7), (2, (2, 2, 3, 6), 1.9)):
        rng = np.random.default_rng(seed)
        logits, labels = normal(rng, *shape, scale=4.0), rng.integers(0, shape[-1], shape[:-1])
        upstream = normal(rng, *shape[:-1])
        leaf = tensor(logits, requires_grad=True)
        out = api.token_log_probs(leaf, torch.tensor(labels), temperature)
        close(out, oracles.token_log_probs(logits, labels, temperature))
        (out * tensor(upstream)).sum().backward()

        def projected(at: oracles.Floats, labels=labels, upstream=upstream, temperature=temperature) -> float:
            return float((oracles.token_log_probs(at, labels, temperature) * upstream).sum())

        close(gradient(leaf), oracles.numerical_gradient(projected, logits), what="d log p / d logits")


def check_token_entropy(api: Any) -> None:
    for seed, shape, temperature in ((0, (2, 5, 11), 1.0), (1, (3, 4), 0.7)):
        rng = np.random.default_rng(seed)
        logits, upstream = normal(rng, *shape, scale=3.0), normal(rng, *shape[:-1])
        leaf = tensor(logits, requires_grad=True)
        out = api.token_entropy(leaf, temperature)
        close(out, oracles.token_entropy(logits, temperature))
        (out * tensor(upstream)).sum().backward()

        def projected(at: oracles.Floats, upstream=upstream, temperature=temperature) -> float:
            return float((oracles.token_entropy(at, temperature) * upstream).sum())

        close(gradient(leaf), oracles.numerical_gradient(projected, logits), atol=1e-5, what="d H / d logits")


def check_poison_before_the_mask(api: Any) -> None:
    """NaN logits of a masked token, through log-probs, entropy and every KL kind, into an aggregated loss."""
    rng = np.random.default_rng(7)
    mask = ragged_mask(rng, 3, 5)
    clean, labels = normal(rng, 3, 5, 6), torch.tensor(rng.integers(0, 6, (3, 5)))
    ref = normal(rng, 3, 5)

    def run(logits: oracles.Floats, ref: oracles.Floats, kind: str) -> tuple[torch.Tensor, oracles.Floats]:
        leaf = tensor(logits, requires_grad=True)
        kl = api.kl_penalty(api.token_log_probs(leaf, labels), tensor(ref), kind)
        loss = api.aggregate(kl, bools(mask), "token-mean") + api.aggregate(
            api.token_entropy(leaf), bools(mask), "token-mean"
        )
        loss.backward()
        return loss.detach(), gradient(leaf)

    for kind in KINDS:
        loss, slope = run(np.where(mask[..., None], clean, np.nan), poisoned(rng, ref, mask), kind)
        expected_loss, expected_slope = run(np.where(mask[..., None], clean, 0.0), np.where(mask, ref, 0.0), kind)
        close(loss, float(expected_loss), what=kind)
        close(slope, np.where(mask[..., None], expected_slope, 0.0), what=kind)


def check_kl_penalty(api: Any) -> None:
    d = np.array([-60.0, -21.0, -5.0, -2.5, -1.0, -1e-3, 1e-3, 0.5, 1.0, 4.0, 9.0, 10.5, 21.0, 60.0])
    rng = np.random.default_rng(0)
    ref = -np.abs(normal(rng, *d.shape))
    log_probs = (ref + d).astype(np.float32).astype(np.float64)
    for kind in KINDS:
        now, frozen = tensor(log_probs, requires_grad=True), tensor(ref, requires_grad=True)
        out = api.kl_penalty(now, frozen, kind)
        gap = log_probs - ref
        close(out, [oracles.kl_value(value, kind) for value in gap], what=kind)
        out.sum().backward()
        close(gradient(now), [oracles.kl_slope(value, kind) for value in gap], what=f"gradient of {kind}")
        assert frozen.grad is None


def check_kl_controllers(api: Any) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        start, target = float(rng.uniform(0.01, 0.5)), float(rng.uniform(0.01, 0.5))
        controller, fixed = api.AdaptiveKLController(start, target, 1000), api.FixedKLController(start)
        expected = start
        for _ in range(6):
            current, steps = float(rng.uniform(-0.1, 3 * target)), int(rng.integers(1, 300))
            controller.update(current, steps)
            fixed.update(current, steps)
            expected *= 1 + float(np.clip(current / target - 1, -0.2, 0.2)) * steps / 1000
        assert math.isclose(controller.kl_coef, expected, rel_tol=1e-12)
        assert fixed.kl_coef == start
        restored = api.AdaptiveKLController(9.0, target, 1000)
        restored.load_state_dict(controller.state_dict())
        assert restored.kl_coef == controller.kl_coef


def check_token_level_rewards(api: Any) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        mask = ragged_mask(rng, 4, 6)
        scores, kl = normal(rng, 4), poisoned(rng, normal(rng, 4, 6), mask)
        scores[~mask.any(axis=1)] = np.nan
        close(api.token_level_rewards(tensor(scores), bools(mask)), oracles.token_level_rewards(scores, mask))
        close(
            api.token_level_rewards(tensor(scores), bools(mask), tensor(kl), 0.3),
            oracles.token_level_rewards(scores, mask, kl, 0.3),
        )


def check_gae(api: Any) -> None:
    for seed, gamma, lam in ((0, 0.99, 0.95), (1, 0.8, 0.6), (2, 1.0, 0.95), (3, 0.9, 0.0), (4, 1.0, 1.0)):
        rng = np.random.default_rng(seed)
        mask = ragged_mask(rng, 4, 8)
        rewards, values = (poisoned(rng, normal(rng, 4, 8), mask) for _ in range(2))
        actual = api.gae(tensor(rewards), tensor(values), bools(mask), gamma, lam)
        for got, expected in zip(actual, oracles.gae(rewards, values, mask, gamma, lam), strict=True):
            close(got, expected, atol=1e-5)


def check_aggregate(api: Any) -> None:
    for seed in range(3):
        data = batch(seed)
        for mode in MODES:
            for counts in ({}, {"num_tokens": 37, "num_sequences": 9}):
                leaf = tensor(data.returns, requires_grad=True)
                out = api.aggregate(leaf, bools(data.mask), mode, **counts)
                close(out, oracles.aggregate(data.returns, data.mask, mode, **counts), what=mode)
                out.backward()

                def loss(at: oracles.Floats, data: Batch = data, mode=mode, counts=counts) -> float:
                    return oracles.aggregate(at, data.mask, mode, **counts)

                close(gradient(leaf), oracles.numerical_gradient(loss, data.returns, data.mask), what=mode)


CHECKS: dict[str, Callable[[Any], None]] = {
    name.removeprefix("check_"): check
    for name, check in [*globals().items(), *vars(battery_losses).items()]
    if name.startswith("check_")
}

"""The oracle checks of the losses; see `battery.py`, which runs them with its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.training.objectives import oracles
from tests.training.objectives.cases import MODES, Batch, batch, bools, close, gradient, normal, tensor

PAIR_NAMES = {"label_smoothing": "smoothing", "center_coef": "center"}  # as the oracle calls them
POLICY_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"low": 0.1, "high": 0.4, "c": 2.0},
    {"c": None, "mode": "seq-mean-token-sum"},
    {"mode": "seq-mean-token-mean", "c": 1.5},
)


def run_policy_loss(api: Any, data: Batch, variant: dict[str, Any], weights: Any = None, **counts: Any) -> Any:
    """(result, gradient) of the implementation under one of POLICY_VARIANTS."""
    now = tensor(data.log_probs, requires_grad=True)
    others = [tensor(x, requires_grad=True) for x in (data.old_log_probs, data.advantages)]
    scale = None if weights is None else tensor(weights, requires_grad=True)
    result = api.policy_loss(
        now,
        *others,
        bools(data.mask),
        clip_ratio_low=variant.get("low", 0.2),
        clip_ratio_high=variant.get("high", 0.2),
        clip_ratio_c=variant.get("c", 3.0),
        loss_agg_mode=variant.get("mode", "token-mean"),
        weights=scale,
        **counts,
    )
    result.loss.backward()
    assert all(x.grad is None for x in [*others, *([] if scale is None else [scale])]), "gradient beyond log_probs"
    return result, gradient(now)


def check_policy_loss(api: Any) -> None:
    for seed, variant in enumerate(POLICY_VARIANTS):
        data = batch(seed, rows=6, columns=8)
        for weights in (None, data.weights, np.array([0.2, 1.0, 3.0, 0.0, 1.3, np.nan])):
            actual, slope = run_policy_loss(api, data, variant, weights)

            def oracle(at: oracles.Floats, data: Batch = data, weights=weights, variant=variant) -> Any:
                return oracles.policy_loss(
                    at, data.old_log_probs, data.advantages, data.mask, weights=weights, **variant
                )

            for name, got, expected in zip(actual._fields, actual, oracle(data.log_probs), strict=True):
                close(got, expected, what=f"{name} {variant}")
            expected_slope = oracles.numerical_gradient(lambda at: oracle(at)[0], data.log_probs, data.mask)
            close(slope, expected_slope, atol=1e-5, what=f"gradient {variant}")
        assert 0 < float(actual.clip_frac) < 1


def check_policy_loss_extremes(api: Any) -> None:
    """Log-ratios far beyond any clip stay finite and bounded by the clamp at +-20."""
    log_probs = np.array([[0.0, -300.0, -19.0, -1.0], [-400.0, 0.0, -25.0, 0.0]])
    old = np.array([[-300.0, 0.0, -1.0, -20.0], [-1.0, -500.0, -0.5, -22.0]])
    advantages = np.array([[-1.0, -1.0, 2.0, 0.5], [1.0, -0.5, -2.0, -1.0]])
    data = Batch(np.ones((2, 4), dtype=bool), log_probs, old, advantages, old, old, old, old)
    for variant in ({"c": None}, {"c": 3.0}):
        actual, slope = run_policy_loss(api, data, variant)
        expected = oracles.policy_loss(log_probs, old, advantages, data.mask, **variant)
        for got, value in zip(actual, expected, strict=True):
            close(got, value)
        assert np.isfinite(slope).all()


def check_policy_loss_splits(api: Any) -> None:
    """Microbatches under global counts add up to the minibatch: loss, gradient and every metric, in every mode."""
    for seed, variant in enumerate(POLICY_VARIANTS):
        data = batch(seed, rows=6, columns=5)
        counts = {"num_tokens": data.num_tokens, "num_sequences": torch.tensor(data.num_sequences)}
        whole, slope = run_policy_loss(api, data, variant, data.weights)
        parts = [
            run_policy_loss(api, part, variant, part.weights, **counts)
            for part in (data.rows(slice(0, 1)), data.rows(slice(1, 4)), data.rows(slice(4, 6)))
        ]
        for i, name in enumerate(whole._fields):
            close(sum(float(part[0][i].detach()) for part in parts), float(whole[i].detach()), what=f"{name} {variant}")
        close(np.concatenate([part[1] for part in parts]), slope, what=f"gradient {variant}")


def run_value_loss(api: Any, data: Batch, weights: Any = None, **options: Any) -> Any:
    values = tensor(data.values, requires_grad=True)
    others = [tensor(x, requires_grad=True) for x in (data.old_values, data.returns)]
    scale = None if weights is None else tensor(weights)
    result = api.value_loss(values, *others, bools(data.mask), weights=scale, **options)
    result.loss.backward()
    assert all(x.grad is None for x in others), "gradient beyond values"
    return result, gradient(values)


def check_value_loss(api: Any) -> None:
    for seed, (cliprange, mode) in enumerate(((0.5, MODES[0]), (0.2, MODES[1]), (None, MODES[2]), (0.3, MODES[2]))):
        data = batch(seed, rows=6, columns=8)
        for weights in (None, data.weights, np.array([0.2, 1.0, 3.0, 0.0, 1.3, np.nan])):
            actual, slope = run_value_loss(api, data, weights, cliprange_value=cliprange, loss_agg_mode=mode)

            def oracle(at: oracles.Floats, data: Batch = data, weights=weights, c=cliprange, mode=mode) -> Any:
                return oracles.value_loss(
                    at, data.old_values, data.returns, data.mask, cliprange=c, weights=weights, mode=mode
                )

            for name, got, expected in zip(actual._fields, actual, oracle(data.values), strict=True):
                close(got, expected, what=name)
            expected_slope = oracles.numerical_gradient(lambda at: oracle(at)[0], data.values, data.mask)
            close(slope, expected_slope, atol=1e-5)
        assert cliprange is None or 0 < float(actual.clip_frac) < 1


def check_value_loss_splits(api: Any) -> None:
    for seed, mode in enumerate(MODES):
        data = batch(seed, rows=6, columns=5)
        options = {"loss_agg_mode": mode}
        counts = {"num_tokens": torch.tensor(data.num_tokens), "num_sequences": data.num_sequences}
        whole, slope = run_value_loss(api, data, data.weights, **options)
        cuts = (slice(0, 2), slice(2, 3), slice(3, 6))
        parts = [run_value_loss(api, data.rows(cut), data.weights[cut], **options, **counts) for cut in cuts]
        close(sum(float(part[0].loss.detach()) for part in parts), float(whole.loss.detach()))
        close(sum(float(part[0].clip_frac) for part in parts), float(whole.clip_frac))
        close(np.concatenate([part[1] for part in parts]), slope)
        fits = [
            api.value_fit(tensor(data.values[cut]), tensor(data.returns[cut]), bools(data.mask[cut])) for cut in cuts
        ]
        merged = fits[0].merge(fits[1]).merge(fits[2]).explained_variance()
        close(merged, oracles.explained_variance(data.values, data.returns, data.mask))


def check_bradley_terry(api: Any) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        scores, margin, weights = normal(rng, 2, 7, scale=2.0), normal(rng, 7) ** 2, np.abs(normal(rng, 7))
        weights[3] = 0.0
        margin = margin.astype(np.float32).astype(np.float64)
        variants: tuple[dict[str, Any], ...] = (
            {},
            {"margin": margin},
            {"label_smoothing": 0.2, "margin": margin},
            {"center_coef": 0.1},
            {"weights": weights, "label_smoothing": 0.1, "center_coef": 0.05, "margin": margin, "num_pairs": 19},
        )
        for variant in variants:
            leaf = tensor(scores, requires_grad=True)
            given = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in variant.items()}
            out = api.bradley_terry_loss(leaf[0], leaf[1], **given)

            def oracle(at: oracles.Floats, variant=variant) -> float:
                return oracles.bradley_terry(at[0], at[1], **{PAIR_NAMES.get(k, k): v for k, v in variant.items()})

            close(out, oracle(scores), what=str(variant))
            out.backward()
            close(gradient(leaf), oracles.numerical_gradient(oracle, scores), what=f"gradient {variant}")


def check_preference_kl(api: Any) -> None:
    for seed, scale in ((0, 1.0), (1, 6.0), (2, 60.0)):
        rng = np.random.default_rng(seed)
        teacher, student = normal(rng, 9, scale=scale), normal(rng, 9, scale=scale)
        frozen, leaf = tensor(teacher, requires_grad=True), tensor(student, requires_grad=True)
        out = api.preference_kl(frozen, leaf)
        close(out, oracles.preference_kl(teacher, student))
        out.backward()
        assert frozen.grad is None
        expected = oracles.numerical_gradient(lambda at, teacher=teacher: oracles.preference_kl(teacher, at), student)
        close(gradient(leaf), expected)
        halves = [api.preference_kl(frozen[cut], leaf[cut], num_pairs=9) for cut in (slice(0, 4), slice(4, 9))]
        close(sum(halves), oracles.preference_kl(teacher, student))


def check_distill(api: Any) -> None:
    for seed, temperature in ((0, 1.0), (1, 2.5)):
        rng = np.random.default_rng(seed)
        teacher, student = normal(rng, 2, 6, scale=2.0), normal(rng, 2, 6) + 0.7
        student, label_weights = student.astype(np.float32).astype(np.float64), np.abs(normal(rng, 6))

        def oracle(at: oracles.Floats, teacher=teacher, temperature=temperature, weights=label_weights) -> float:
            terms = oracles.distill_terms(teacher[0], teacher[1], at[0], at[1], temperature, weights)
            return sum(c * term for c, term in zip((1.0, 0.3, 0.7, 0.9), terms, strict=True))

        def run(
            cut: slice, teacher=teacher, student=student, t=temperature, weights=label_weights, **counts: Any
        ) -> Any:
            frozen, leaf = tensor(teacher[:, cut], requires_grad=True), tensor(student[:, cut], requires_grad=True)
            loss = api.distill_loss(
                *frozen,
                *leaf,
                temperature=t,
                margin_weight=0.3,
                pointwise_weight=0.7,
                label_weight=0.9,
                label_weights=tensor(weights[cut]),
                **counts,
            )
            loss.backward()
            assert frozen.grad is None
            return loss, gradient(leaf)

        loss, slope = run(slice(None))
        close(loss, oracle(student))
        expected_slope = oracles.numerical_gradient(oracle, student)
        close(slope, expected_slope)
        offset = float((student - teacher).mean())
        parts = [run(cut, num_pairs=6, score_offset=offset) for cut in (slice(0, 1), slice(1, 6))]
        close(sum(part[0] for part in parts), oracle(student))
        close(np.concatenate([part[1] for part in parts], axis=1), expected_slope)

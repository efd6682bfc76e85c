"""Slow, obvious float64 versions of the objectives, written from the papers with loops over single tokens and pairs.

They share no code and, where there is a choice, no algorithm with what they judge: the GAE here is the double sum of
the definition, not the recursion. Arrays may hold NaN in masked slots, which a loop over valid slots never reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def numerical_gradient(function: Callable[[Floats], float], x: Floats, where: Bools | None = None) -> Floats:
    """Central differences in float64; slots outside `where` (masked ones) get 0 and are not touched."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        if where is not None and not where[index]:
            continue
        step = 1e-6 * max(1.0, abs(x[index]))
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


def valid_slots(mask: Bools) -> Iterator[tuple[int, int]]:
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                yield b, t


# masked statistics


def masked_mean(x: Floats, mask: Bools) -> float:
    chosen = [float(x[index]) for index in np.ndindex(x.shape) if mask[index]]
    return math.fsum(chosen) / len(chosen) if chosen else 0.0


def masked_var(x: Floats, mask: Bools, unbiased: bool = True) -> float:
    chosen = [float(x[index]) for index in np.ndindex(x.shape) if mask[index]]
    if len(chosen) < 2:
        return 0.0
    mean = math.fsum(chosen) / len(chosen)
    return math.fsum((value - mean) ** 2 for value in chosen) / (len(chosen) - (1 if unbiased else 0))


def masked_whiten(x: Floats, mask: Bools, shift_mean: bool = True) -> Floats:
    mean, spread = masked_mean(x, mask), math.sqrt(masked_var(x, mask) + 1e-8)
    out = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        if mask[index]:
            out[index] = (x[index] - mean) / spread + (0.0 if shift_mean else mean)
    return out


# distributions over the vocabulary


def log_softmax(row: Floats, temperature: float) -> Floats:
    scaled = row / temperature
    peak = scaled.max()
    return scaled - peak - math.log(sum(math.exp(value - peak) for value in scaled))


def token_log_probs(logits: Floats, labels: NDArray[np.int64], temperature: float = 1.0) -> Floats:
    out = np.zeros(labels.shape)
    for index in np.ndindex(labels.shape):
        if labels[index] != -100:
            out[index] = log_softmax(logits[index], temperature)[labels[index]]
    return out


def token_entropy(logits: Floats, temperature: float = 1.0) -> Floats:
    out = np.zeros(logits.shape[:-1])
    for index in np.ndindex(out.shape):
        for log_p in log_softmax(logits[index], temperature):
            if log_p > -math.inf:
                out[index] -= math.exp(log_p) * log_p
    return out


# KL estimates


def kl_value(d: float, kind: str) -> float:
    kind = kind.removesuffix("+")
    if kind == "k1":
        return d
    if kind == "abs":
        return abs(d)
    if kind == "k2":
        return d * d / 2
    d = min(max(d, -20.0), 20.0)
    return min(max(math.exp(-d) + d - 1, -10.0), 10.0)


def kl_slope(d: float, kind: str) -> float:
    """d value / d log_probs, and that of k2 for every straight-through kind."""
    if kind.endswith("+") or kind == "k2":
        return d
    if kind == "k1":
        return 1.0
    if kind == "abs":
        return math.copysign(1.0, d)
    inside = abs(d) < 20 and math.exp(-d) + d - 1 < 10
    return 1 - math.exp(-d) if inside else 0.0


# rewards and advantages


def token_level_rewards(scores: Floats, mask: Bools, kl: Floats | None = None, kl_coef: float = 0.0) -> Floats:
    out = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        positions = [t for t in range(mask.shape[1]) if mask[b, t]]
        for t in positions:
            out[b, t] = -kl_coef * kl[b, t] if kl is not None else 0.0
        if positions:
            out[b, positions[-1]] += scores[b]
    return out


def gae(rewards: Floats, values: Floats, mask: Bools, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, on the valid tokens alone."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        positions = [t for t in range(mask.shape[1]) if mask[b, t]]
        v = [values[b, t] for t in positions] + [0.0]
        deltas = [rewards[b, t] + gamma * v[i + 1] - v[i] for i, t in enumerate(positions)]
        for i, t in enumerate(positions):
            advantages[b, t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(positions)))
            returns[b, t] = advantages[b, t] + values[b, t]
    return advantages, returns


# aggregation and PPO losses


def aggregate(
    x: Floats, mask: Bools, mode: str, num_tokens: float | None = None, num_sequences: float | None = None
) -> float:
    rows = [[float(x[b, t]) for t in range(mask.shape[1]) if mask[b, t]] for b in range(mask.shape[0])]
    rows = [row for row in rows if row]
    tokens = sum(len(row) for row in rows) if num_tokens is None else num_tokens
    sequences = len(rows) if num_sequences is None else num_sequences
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / tokens if tokens else 0.0
    per_row = [sum(row) / (len(row) if mode == "seq-mean-token-mean" else 1) for row in rows]
    return sum(per_row) / sequences if sequences else 0.0


def weight_of(weights: Floats | None, b: int, t: int) -> float:
    if weights is None:
        return 1.0
    return float(weights[b] if weights.ndim == 1 else weights[b, t])


def policy_loss(
    log_probs: Floats,
    old_log_probs: Floats,
    advantages: Floats,
    mask: Bools,
    *,
    low: float = 0.2,
    high: float = 0.2,
    c: float | None = 3.0,
    weights: Floats | None = None,
    mode: str = "token-mean",
    num_tokens: float | None = None,
    num_sequences: float | None = None,
) -> tuple[float, float, float, float]:
    """(loss, clip_frac, clip_frac_lower, approx_kl): the objective of the papers, min(...), with its sign turned."""
    losses, clipped, capped, kl = (np.zeros(mask.shape) for _ in range(4))
    for b, t in valid_slots(mask):
        log_ratio = log_probs[b, t] - old_log_probs[b, t]
        kl[b, t] = -log_ratio
        ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
        bounded = min(max(ratio, 1 - low), 1 + high)
        advantage = advantages[b, t]
        objective = min(ratio * advantage, bounded * advantage)
        clipped[b, t] = bounded * advantage < ratio * advantage
        if c is not None and advantage < 0:
            capped[b, t] = objective < c * advantage
            objective = max(objective, c * advantage)
        losses[b, t] = -objective * weight_of(weights, b, t)
    shares = (aggregate(x, mask, "token-mean", num_tokens) for x in (clipped, capped, kl))
    return (aggregate(losses, mask, mode, num_tokens, num_sequences), *shares)


def value_loss(
    values: Floats,
    old_values: Floats,
    returns: Floats,
    mask: Bools,
    *,
    cliprange: float | None = 0.5,
    weights: Floats | None = None,
    mode: str = "token-mean",
    num_tokens: float | None = None,
    num_sequences: float | None = None,
) -> tuple[float, float, float]:
    """(loss, clip_frac, explained_variance)."""
    losses, clipped = np.zeros(mask.shape), np.zeros(mask.shape)
    for b, t in valid_slots(mask):
        error = (values[b, t] - returns[b, t]) ** 2
        if cliprange is not None:
            bounded = min(max(values[b, t], old_values[b, t] - cliprange), old_values[b, t] + cliprange)
            clipped_error = (bounded - returns[b, t]) ** 2
            clipped[b, t] = clipped_error > error
            error = max(error, clipped_error)
        losses[b, t] = 0.5 * error * weight_of(weights, b, t)
    loss = aggregate(losses, mask, mode, num_tokens, num_sequences)
    return loss, aggregate(clipped, mask, "token-mean", num_tokens), explained_variance(values, returns, mask)


def explained_variance(values: Floats, returns: Floats, mask: Bools) -> float:
    spread = masked_var(returns, mask)
    residuals = np.where(mask, returns, 0.0) - np.where(mask, values, 0.0)
    return 1 - masked_var(residuals, mask) / spread if spread > 0 else 0.0


# preferences


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def bradley_terry(
    chosen: Floats,
    rejected: Floats,
    *,
    margin: Floats | None = None,
    smoothing: float = 0.0,
    center: float = 0.0,
    weights: Floats | None = None,
    num_pairs: float | None = None,
) -> float:
    total = 0.0
    for i in range(len(chosen)):
        z = chosen[i] - rejected[i] - (0.0 if margin is None else margin[i])
        right, wrong = softplus(-z), softplus(z)
        term = ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
        total += term * (1.0 if weights is None else weights[i]) + center * (chosen[i] + rejected[i]) ** 2
    count = len(chosen) if num_pairs is None else num_pairs
    return total / count if count else 0.0


def preference_kl(teacher: Floats, student: Floats, num_pairs: float | None = None) -> float:
    total = 0.0
    for t, s in zip(teacher, student, strict=True):
        for sign in (1, -1):  # log sigmoid(x) = -softplus(-x)
            total += math.exp(-softplus(-sign * t)) * (softplus(-sign * s) - softplus(-sign * t))
    count = len(teacher) if num_pairs is None else num_pairs
    return total / count if count else 0.0


def distill_terms(
    teacher_chosen: Floats,
    teacher_rejected: Floats,
    student_chosen: Floats,
    student_rejected: Floats,
    temperature: float = 1.0,
    label_weights: Floats | None = None,
) -> tuple[float, float, float, float]:
    teacher_margins, student_margins = teacher_chosen - teacher_rejected, student_chosen - student_rejected
    teacher = np.concatenate([teacher_chosen, teacher_rejected])
    student = np.concatenate([student_chosen, student_rejected])
    pairs = len(teacher_chosen)
    return (
        preference_kl(teacher_margins / temperature, student_margins / temperature),
        sum((t - s) ** 2 for t, s in zip(teacher_margins, student_margins, strict=True)) / pairs,
        sum(((t - teacher.mean()) - (s - student.mean())) ** 2 for t, s in zip(teacher, student, strict=True))
        / (2 * pairs),
        bradley_terry(student_chosen, student_rejected, weights=label_weights),
    )

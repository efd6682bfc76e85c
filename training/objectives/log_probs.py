"""Log-probabilities and entropies of next-token distributions, without a float32 copy of the logits.

Logits [.., T, V] are the largest tensor of a training step. They are read block by block: a block of rows is copied to
float32, reduced over V and dropped. Autograd keeps the logits themselves (in the model's dtype) and two numbers a row;
backward goes over the blocks again and writes straight into the gradient, which has the logits' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.objectives.checks import require_floating, require_positive

IGNORE_INDEX = -100
_BLOCK_ELEMENTS = 2**22
_FEWEST_BLOCKS = 8

Block = tuple[slice, ...]


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the labels, in nats.

    Shapes: logits [.., T, V] floating, labels [.., T] integer -> [.., T] float32. `logits[.., t, :]` must already be
    the distribution of `labels[.., t]`: nothing is shifted here. A label of -100 (no token) gives 0 and no gradient. A
    row whose upstream gradient is 0 receives a gradient of 0 even when its logits are NaN, so that masking downstream
    is enough. Once differentiable. Raises TypeError, ValueError.
    """
    _require_logits(logits, temperature)
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels have shape {tuple(labels.shape)}, logits [.., T, V] {tuple(logits.shape)}")
    _require_vocabulary(labels, logits.shape[-1])
    found = _TokenLogProbs.apply(logits, labels.long(), float(temperature))  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Shannon entropy of softmax(logits / temperature), in nats: [.., T, V] -> [.., T] float32.

    A logit of -inf (a token ruled out) counts as probability 0. Gradients and errors as in `token_log_probs`.
    """
    _require_logits(logits, temperature)
    return cast(Tensor, _TokenEntropy.apply(logits, float(temperature)))  # type: ignore[no-untyped-call]


def _require_logits(logits: Tensor, temperature: float) -> None:
    require_floating(logits=logits)
    require_positive("temperature", temperature)
    if logits.dim() < 2 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape [.., T, V] with V > 0, got {tuple(logits.shape)}")


def _require_vocabulary(labels: Tensor, vocabulary: int) -> None:
    # Only where looking is free: on a device it would mean waiting for it, and the gather there asserts by itself.
    if labels.device.type == "cpu":
        wrong = (labels >= vocabulary) | ((labels < 0) & (labels != IGNORE_INDEX))
        if bool(wrong.any()):
            raise ValueError(f"label {int(labels[wrong][0])} is outside the vocabulary of {vocabulary}")


def _blocks(shape: torch.Size) -> Iterator[Block]:
    """Slices that cover all rows of [.., T, V], each at most `_BLOCK_ELEMENTS` numbers and an eighth of the rows.

    Slices, not a reshape: `logits[:, :-1]` is not contiguous, and flattening it would copy the whole of it.
    """
    *rows, vocabulary = shape
    room = max(1, min(_BLOCK_ELEMENTS // vocabulary, -(-math.prod(rows) // _FEWEST_BLOCKS)))
    extents: list[int] = []
    for size in reversed(rows):
        extents.insert(0, max(1, min(size, room)))
        room //= extents[0]
    axes = [range(0, size, extent) for size, extent in zip(rows, extents, strict=True)]
    for starts in product(*axes):
        yield tuple(slice(start, start + extent) for start, extent in zip(starts, extents, strict=True))


def _scaled(block: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """(logits - peak) / temperature, a fresh float32 block; the peak goes first: large logits keep their digits."""
    return block.to(torch.float32, copy=True).sub_(peak.unsqueeze(-1)).div_(temperature)


class _TokenLogProbs(torch.autograd.Function):
    """d log p(y) / d logit_j = (1[j = y] - p_j) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        log_probs, peaks, log_sums = (logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(3))
        ignored = labels == IGNORE_INDEX
        labels = labels.masked_fill(ignored, 0)
        for block in _blocks(logits.shape):
            peaks[block] = logits[block].amax(dim=-1).float()
            scaled = _scaled(logits[block], peaks[block], temperature)
            chosen = scaled.gather(-1, labels[block].unsqueeze(-1)).squeeze(-1)
            log_sums[block] = scaled.exp_().sum(dim=-1).log_()
            log_probs[block] = chosen - log_sums[block]
        ctx.save_for_backward(logits, labels, ignored, peaks, log_sums)
        ctx.temperature = temperature
        return log_probs.masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, ignored, peaks, log_sums = ctx.saved_tensors
        upstream = upstream.float().masked_fill(ignored, 0.0) / ctx.temperature
        gradient = torch.empty_like(logits)
        for block in _blocks(logits.shape):
            rows = upstream[block].unsqueeze(-1)
            local = _scaled(logits[block], peaks[block], ctx.temperature).sub_(log_sums[block].unsqueeze(-1)).exp_()
            local.mul_(-rows).scatter_add_(-1, labels[block].unsqueeze(-1), rows)
            gradient[block] = local.masked_fill_(rows == 0, 0.0)
        return gradient, None, None


class _TokenEntropy(torch.autograd.Function):
    """H = -sum p log p, and d H / d logit_j = -p_j (log p_j + H) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        entropies, peaks, log_sums = (logits.new_empty(logits.shape[:-1], dtype=torch.float32) for _ in range(3))
        for block in _blocks(logits.shape):
            peaks[block] = logits[block].amax(dim=-1).float()
            scaled = _scaled(logits[block], peaks[block], temperature)
            unnormalised = scaled.exp()
            total = unnormalised.sum(dim=-1)
            log_sums[block] = total.log()
            scaled.masked_fill_(scaled == -math.inf, 0.0)  # p log p -> 0 as p -> 0
            entropies[block] = log_sums[block] - scaled.mul_(unnormalised).sum(dim=-1) / total
        entropies.clamp_(min=0.0)
        ctx.save_for_backward(logits, peaks, log_sums, entropies.clone())
        ctx.temperature = temperature
        return entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        logits, peaks, log_sums, entropies = ctx.saved_tensors
        upstream = upstream.float() / ctx.temperature
        gradient = torch.empty_like(logits)
        for block in _blocks(logits.shape):
            rows = upstream[block].unsqueeze(-1)
            log_p = _scaled(logits[block], peaks[block], ctx.temperature).sub_(log_sums[block].unsqueeze(-1))
            p = log_p.exp()
            log_p.masked_fill_(log_p == -math.inf, 0.0)
            local = log_p.add_(entropies[block].unsqueeze(-1)).mul_(p).mul_(-rows)
            gradient[block] = local.masked_fill_(rows == 0, 0.0)
        return gradient, None

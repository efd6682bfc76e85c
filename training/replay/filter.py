"""Policy filtration: keep the trajectories whose reward the reward model ranks reliably, prompt by prompt.

Source: Zhang et al., Policy Filtration for RLHF to Mitigate Noise in Reward Models, arXiv 2409.06957 (PF-PPO). Its
finding: keeping only the best answer is worse than plain PPO, best + random and best + worst are better. So there is
no "best only". N is the number of trajectories.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from training.errors import DataError

FilterMethod = Literal["none", "best_random", "best_worst", "power"]


def preference_filter_weights(
    scores: Tensor,
    group_ids: Tensor | Sequence[Hashable],
    method: FilterMethod,
    power: float = 2.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Weights [N] float32, decided within each prompt's group and never across groups.

    `scores` [N]: reward-model scores; `group_ids` [N]: equal for answers to one prompt (integers or, as a sequence, any
    hashable such as a prompt_id).

    * `none`: 1 for all.
    * `best_random`: 1 for the group's best and for one other of the group, drawn evenly; 0 for the rest.
    * `best_worst`: 1 for the group's best and worst; 0 for the rest.
    * `power`: |score - mean of the group| ** power.

    Ties: among equal best scores the earliest row is the best, among equal worst ones the latest row is the worst, so a
    group of two or more always keeps two rows. A group of one keeps its row (1), except under `power`, where a group of
    one, like a group of equal scores, shows no preference: 0.

    `best_random` draws from `generator`, the run's own (one draw of N numbers a call). Without one, a generator is
    seeded from the scores and groups themselves: the same input gives the same choice, and the global generator is
    never touched.

    Raises DataError for a score that is not finite, ValueError for other wrong arguments.
    """
    if method not in ("none", "best_random", "best_worst", "power"):
        raise ValueError(f'method {method!r} is none of "none", "best_random", "best_worst", "power"')
    if not power >= 0.0:
        raise ValueError(f"power {power!r} must not be negative")
    values, codes = _checked(scores, group_ids)
    if method == "none" or values.numel() == 0:
        return torch.ones_like(values, dtype=torch.float32)
    if method == "power":
        return _centred(values, codes).abs().pow(power).float()
    first, last = _group_ends(values, codes)
    if method == "best_random":
        last = _random_other(codes, first, _uniform(values, codes, generator))
    weights = torch.zeros_like(values, dtype=torch.float32)
    weights[first] = 1.0
    weights[last] = 1.0
    return weights


def filter_reliability(rm_scores: Tensor, gold_scores: Tensor, weights: Tensor) -> Tensor:
    """How well the reward model's scores tell the gold ones on the filtered trajectories: R^2, 0-d float32 in [0, 1].

    All arguments [N]. The coefficient of determination of the weighted least-squares line gold = a + b * score, which
    is the squared weighted correlation (PF-PPO's measure for choosing a strategy). Rows of weight 0 may hold NaN. 0
    where either side has no spread or nothing has weight. Raises ValueError for shapes that differ or a negative
    weight.
    """
    if not rm_scores.shape == gold_scores.shape == weights.shape or rm_scores.dim() != 1:
        shapes = tuple(tuple(x.shape) for x in (rm_scores, gold_scores, weights))
        raise ValueError(f"scores, gold scores and weights must share one shape [N], got {shapes}")
    if bool((weights < 0).any()):
        raise ValueError("a filter weight is negative")
    with torch.no_grad():
        kept = weights > 0
        share = weights[kept].double()
        if share.numel() == 0:
            return torch.zeros((), device=weights.device)
        share = share / share.sum()
        score, gold = rm_scores[kept].double(), gold_scores[kept].double()
        score, gold = score - (share * score).sum(), gold - (share * gold).sum()
        spread = (share * score.square()).sum() * (share * gold.square()).sum()
        explained = (share * score * gold).sum().square() / spread
        return torch.where(spread == 0, 0.0, explained).clamp(max=1.0).float()


def _checked(scores: Tensor, group_ids: Tensor | Sequence[Hashable]) -> tuple[Tensor, Tensor]:
    """Scores as float32 (float64 stays) and groups as codes 0..G-1, both [N]."""
    scores = torch.as_tensor(scores).detach()
    values = scores if scores.dtype == torch.float64 else scores.float()
    if not isinstance(group_ids, Tensor):
        seen: dict[Hashable, int] = {}
        group_ids = torch.tensor([seen.setdefault(group, len(seen)) for group in group_ids], dtype=torch.long)
    if values.dim() != 1 or group_ids.shape != values.shape:
        shapes = f"scores {tuple(values.shape)} and group_ids {tuple(group_ids.shape)}"
        raise ValueError(f"{shapes} must share one shape [N]")
    bad = torch.nonzero(~torch.isfinite(values))
    if bad.numel():
        row = int(bad[0])
        raise DataError(
            f"score of trajectory {row} is {float(values[row])}: it cannot be ranked within its prompt's answers",
            "score every trajectory before filtering, and leave out those whose scoring failed",
        )
    return values, torch.unique(group_ids.to(values.device), return_inverse=True)[1]


def _group_ends(values: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [G] of each group's highest value (earliest of equals) and lowest value (latest of equals)."""
    by_value = torch.sort(values, descending=True, stable=True).indices
    order = by_value[torch.sort(codes[by_value], stable=True).indices]
    counts = torch.bincount(codes)
    ends = counts.cumsum(0)
    return order[ends - counts], order[ends - 1]


def _random_other(codes: Tensor, best: Tensor, uniform: Tensor) -> Tensor:
    """Rows [G]: one of each group that is not its best, drawn evenly; the best itself in a group of one."""
    draws = uniform.clone()
    draws[best] = -1.0
    return _group_ends(draws, codes)[0]


def _uniform(values: Tensor, codes: Tensor, generator: torch.Generator | None) -> Tensor:
    """[N] numbers in [0, 1) from the given generator, or from one seeded by the content."""
    if generator is None:
        content = values.double().cpu().numpy().tobytes() + codes.cpu().numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(content).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(values.numel(), generator=generator, device=generator.device, dtype=torch.float64)
    return draws.to(values.device)


def _centred(values: Tensor, codes: Tensor) -> Tensor:
    """Scores minus their group's mean. Equal scores give exactly 0, whatever the rounding of the mean."""
    groups = int(codes.max()) + 1
    # Shifting by a member first keeps a group of equal scores exact and large offsets harmless.
    anchor = torch.empty(groups, dtype=values.dtype, device=values.device).scatter_(0, codes, values)
    shifted = values - anchor[codes]
    total = torch.zeros_like(anchor).scatter_add_(0, codes, shifted)
    return shifted - (total / torch.bincount(codes))[codes]

"""Scoring pairs while training: what the teacher's and the student's loops share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from training.examples import Pair
from training.models.layout import build_layout, group_sizes
from training.models.network import Network
from training.models.tokenize import pad_id


class PairRows:
    """Pairs laid out for one network; the part of a supervised task that knows rows."""

    def __init__(self, network: Network, pairs: Sequence[Pair], layout: str) -> None:
        self.network = network
        self.pairs = pairs
        self.layout = layout
        self.names = [pair.row_id for pair in pairs]
        self.sizes = group_sizes([pair.group for pair in pairs], layout)

    def count(self, items: Sequence[int]) -> float:
        """Pairs: what every loss on pairs is divided by."""
        return float(len(items))

    def pair_scores(self, items: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the chosen and of the rejected side, [P, k] each, with gradient."""
        groups = [self.pairs[i].group for i in items]
        layout = build_layout(groups, self.layout, pad_id(self.network.backbone.tokenizer))
        scores = self.network.scores(layout.to(self.network.backbone.device))
        return scores[0::2], scores[1::2]

"""Answers in memory: what was stored, what was sampled tonight, and the tensors of one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from training.models.layout import Group
from training.replay.view import StoreView

Float32s = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Experience:
    """One answer, annotated. Log-probs are [R] in nats: `behavior` of who wrote it, `ref` of the frozen model.

    `recorded`: `behavior` was recorded while it was written. Else the reference stands in for an unknown writer.
    """

    prompt_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    behavior_log_probs: Float32s
    ref_log_probs: Float32s
    score: float
    finished: bool
    round: int  # -1: stored before tonight
    recorded: bool = True  # tonight's always are

    @property
    def group(self) -> Group:
        """As a layout wants it."""
        return Group(self.prompt_ids, (self.response_ids,))

    @property
    def filter_group(self) -> str:
        """Answers compete within a prompt and within the time they were written."""
        return f"{self.prompt_id}/{self.round}"


class ExperiencePool:
    """Stored answers read lazily from the store's view, then tonight's, in the order sampled. Indices never move."""

    def __init__(self, view: StoreView) -> None:
        self._view = view
        self.fresh: list[Experience] = []

    def __len__(self) -> int:
        return len(self._view) + len(self.fresh)

    @property
    def num_stored(self) -> int:
        """Answers from before tonight: indices 0 .. num_stored - 1."""
        return len(self._view)

    def add(self, experiences: Sequence[Experience]) -> NDArray[np.int64]:
        """Append tonight's answers; returns their indices."""
        first = len(self)
        self.fresh += experiences
        return np.arange(first, len(self))

    def scores(self) -> Float32s:
        """[N] scores of all."""
        return np.concatenate([self._view.scores, np.asarray([e.score for e in self.fresh], dtype=np.float32)])

    def filter_groups(self) -> list[str]:
        """[N] filter groups of all."""
        return [f"{prompt_id}/-1" for prompt_id in self._view.prompt_id] + [e.filter_group for e in self.fresh]

    def take(self, indices: Sequence[int]) -> list[Experience]:
        """These answers, in order."""
        stored = sorted({i for i in indices if i < self.num_stored})
        found = dict(zip(stored, self._read(stored), strict=True)) if stored else {}
        return [found[i] if i < self.num_stored else self.fresh[i - self.num_stored] for i in indices]

    def _read(self, indices: Sequence[int]) -> list[Experience]:
        batch = self._view.batch(np.asarray(indices))
        experiences = []
        for i in range(len(batch)):
            behavior, reference = batch.behavior_log_probs[i], batch.ref_log_probs[i]
            assert behavior is not None  # the view was checked when it was made
            assert reference is not None
            experiences.append(
                Experience(
                    batch.prompt_id[i], tuple(batch.prompt_ids[i].tolist()), tuple(batch.response_ids[i].tolist()),
                    behavior, reference, float(batch.scores[i]), bool(batch.eos[i]), -1, not batch.estimated[i],
                )
            )  # fmt: skip
        return experiences


@dataclass
class RoundBatch:
    """The tensors of one round: [B, R] unless said otherwise; masked slots are 0."""

    indices: torch.Tensor  # [B] int64, into the pool
    response_mask: torch.Tensor  # bool
    behavior_log_probs: torch.Tensor
    ref_log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    old_values: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    weights: torch.Tensor  # importance x priority
    shaped_scores: torch.Tensor  # [B]

    def tensors(self) -> dict[str, torch.Tensor]:
        """For a checkpoint."""
        return dict(vars(self))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> RoundBatch:
        """From a checkpoint."""
        return cls(**tensors)


def padded(rows: Sequence[Float32s], width: int) -> torch.Tensor:
    """[B, width] float32 from ragged rows, 0 where they end."""
    out = torch.zeros((len(rows), width))
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.from_numpy(np.asarray(row, dtype=np.float32))
    return out


def response_mask(experiences: Sequence[Experience], width: int) -> torch.Tensor:
    """[B, width] bool, True on response tokens."""
    lengths = torch.tensor([len(e.response_ids) for e in experiences])
    return torch.arange(width)[None, :] < lengths[:, None]


def pack(experiences: Sequence[Experience]) -> dict[str, torch.Tensor]:
    """Tonight's answers as flat tensors, for a checkpoint. `prompt_id` goes as bytes."""

    def flat(rows: Sequence[Sequence[int] | Float32s], kind: torch.dtype) -> torch.Tensor:
        arrays = [torch.as_tensor(np.asarray(row), dtype=kind) for row in rows]
        return torch.cat(arrays) if arrays else torch.zeros(0, dtype=kind)

    names = [list(e.prompt_id.encode()) for e in experiences]
    return {
        "prompt_id": flat(names, torch.uint8),
        "prompt_ids": flat([e.prompt_ids for e in experiences], torch.int64),
        "response_ids": flat([e.response_ids for e in experiences], torch.int64),
        "behavior_log_probs": flat([e.behavior_log_probs for e in experiences], torch.float32),
        "ref_log_probs": flat([e.ref_log_probs for e in experiences], torch.float32),
        "lengths": torch.tensor(
            [[len(n), len(e.prompt_ids), len(e.response_ids)] for n, e in zip(names, experiences, strict=True)],
            dtype=torch.int64,
        ).reshape(-1, 3),
        "scores": torch.tensor([e.score for e in experiences], dtype=torch.float64),
        "flags": torch.tensor([[int(e.finished), e.round] for e in experiences], dtype=torch.int64).reshape(-1, 2),
    }


def unpack(tensors: Mapping[str, torch.Tensor]) -> list[Experience]:
    """What `pack` was given."""
    sizes = tensors["lengths"].T.tolist()
    names, prompts = tensors["prompt_id"].split(sizes[0]), tensors["prompt_ids"].split(sizes[1])
    responses = tensors["response_ids"].split(sizes[2])
    behavior, reference = tensors["behavior_log_probs"].split(sizes[2]), tensors["ref_log_probs"].split(sizes[2])
    flags, scores = tensors["flags"].tolist(), tensors["scores"].tolist()
    return [
        Experience(
            bytes(names[i].tolist()).decode(), tuple(prompts[i].tolist()), tuple(responses[i].tolist()),
            behavior[i].numpy().copy(), reference[i].numpy().copy(), scores[i], bool(flags[i][0]), flags[i][1],
        )
        for i in range(len(scores))
    ]  # fmt: skip

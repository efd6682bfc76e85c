"""What one policy answers to the frozen prompts, and all that is measured on those answers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from configs.schema.evaluation import EvaluationConfig
from configs.schema.models import ModelsConfig
from training.contract import FileRef
from training.evaluation.text_metrics import distinct_2, repetition_share, words
from training.examples import Encoder, Prompt
from training.models.backbone import Backbone
from training.models.layout import Group
from training.models.network import Network
from training.models.sampling import SamplingSettings, sample_responses
from training.models.tokenize import decode_response
from training.ppo.probe import sequence_kl
from training.recorder import Recorder
from training.runtime import pick_device, pick_dtype
from training.seeding import torch_generator
from training.sft import response_nll

Floats = NDArray[np.float64]


@dataclass
class PolicyAnswers:
    """One policy on N prompts, in their order; arrays are [N]. `rewards`: scorer name -> scores."""

    model: FileRef
    texts: list[str]
    token_ids: list[tuple[int, ...]]
    finished: Floats
    kl_sums: Floats  # nats a sequence
    nll_sums: Floats  # of held-out chosen texts, [M]
    nll_tokens: Floats
    rewards: dict[str, Floats] = field(default_factory=dict)

    @property
    def lengths(self) -> Floats:
        """Response tokens."""
        return np.asarray([len(ids) for ids in self.token_ids], dtype=np.float64)

    @property
    def distinct_2(self) -> Floats:
        """Share of different word pairs within each answer."""
        return np.asarray([distinct_2(words(text)) for text in self.texts])

    @property
    def repetition_share(self) -> Floats:
        """Share of words inside a repeated triple."""
        return np.asarray([repetition_share(words(text)) for text in self.texts])


class Respondent:
    """Puts the same questions, with the same random numbers, to one policy after another; one in memory at a time."""

    def __init__(
        self, reference: FileRef, models: ModelsConfig, evaluation: EvaluationConfig, budget: int, seed: int,
        recorder: Recorder,
    ) -> None:  # fmt: skip
        self.device = pick_device()
        self.dtype = pick_dtype(models.dtype, self.device)
        self.models, self.evaluation, self.budget, self.seed = models, evaluation, budget, seed
        self.reference_ref, self.recorder = reference, recorder
        self.reference = Network(Backbone.load(reference.path, device=self.device, dtype=self.dtype))
        self.encoder = Encoder(self.reference.backbone.tokenizer, models)

    def sample(
        self, model: FileRef, prompts: Sequence[Prompt], name: str, doing: str
    ) -> tuple[Network, list[Group], Floats]:
        """Load a policy and let it answer; `name` names the random numbers, `doing` tells what goes on."""
        policy = self._load(model)
        settings = SamplingSettings(
            self.models.max_response_length, self.evaluation.temperature, batch_size=self.evaluation.batch_size
        )
        draws = torch_generator(self.seed, f"evaluation/{name}")
        told = self.recorder.counting(doing, len(prompts))
        samples = sample_responses(policy, [p.token_ids for p in prompts], settings, draws, told)
        groups = [Group(p.token_ids, (s.token_ids,)) for p, s in zip(prompts, samples, strict=True)]
        return policy, groups, np.asarray([s.finished for s in samples], dtype=np.float64)

    def answer(self, role: str, model: FileRef, prompts: Sequence[Prompt], held_out: Sequence[Group]) -> PolicyAnswers:
        """Everything measured on one policy, which plays `role`."""
        policy, groups, finished = self.sample(model, prompts, "answers", f"{role} answers")
        token_ids = [tuple(group.responses[0]) for group in groups]
        told = self.recorder.counting(f"KL of the {role}", len(groups))
        return PolicyAnswers(
            model=model,
            texts=[decode_response(policy.backbone.tokenizer, ids) for ids in token_ids],
            token_ids=token_ids,
            finished=finished,
            kl_sums=np.asarray(sequence_kl(policy, self.reference, groups, self.budget, told)),
            nll_sums=np.asarray(response_nll(policy, held_out, self.budget)),
            nll_tokens=np.asarray([len(group.responses[0]) for group in held_out], dtype=np.float64),
        )

    def _load(self, model: FileRef) -> Network:
        if model.sha256 == self.reference_ref.sha256:
            return self.reference
        return Network(Backbone.load(model.path, device=self.device, dtype=self.dtype))

"""Measuring a policy outside of its budget: gold reward, proxy reward and the real KL, on frozen prompts."""

from __future__ import annotations

from pathlib import Path

from configs.schema import NightConfig
from tasks.stages import Materials
from tests.benchmarks.alignment.results import Point
from training.examples import Encoder, encode_prompts, read_split
from training.models.backbone import Backbone
from training.models.layout import Group
from training.models.network import Network
from training.models.sampling import SamplingSettings, sample_responses
from training.ppo.probe import sequence_kl
from training.runtime import pick_device, pick_dtype
from training.scoring import FunctionScorer, ModelScorer, Question
from training.seeding import torch_generator

_REFERENCES: dict[tuple[str, str, int], Point] = {}


class Examiner:
    """The same questions, with the same random numbers, to every policy of a cell."""

    def __init__(self, config: NightConfig, materials: Materials) -> None:
        assert materials.reference is not None
        assert materials.reward_model is not None
        assert materials.snapshot is not None
        self.device, self.config = pick_device(), config
        self.dtype = pick_dtype(config.models.dtype, self.device)
        self.reference, self.reference_digest = self.load(materials.reference.path), materials.reference.sha256
        tokenizer = self.reference.backbone.tokenizer
        rows = read_split_of(materials, "evaluation")
        self.prompts = encode_prompts(rows, Encoder(tokenizer, config.models), config.evaluation.prompts)
        self.gold = FunctionScorer(config.evaluation.gold_function or "quickstart", (), tokenizer)
        self.budget = config.reward.max_tokens_per_microbatch
        self.proxy = ModelScorer(materials.reward_model, config.models, tokenizer, self.budget)
        self._sampling = SamplingSettings(config.models.max_response_length, batch_size=config.evaluation.batch_size)

    def load(self, folder: str) -> Network:
        """A policy from a model folder."""
        return Network(Backbone.load(folder, device=self.device, dtype=self.dtype))

    def of_reference(self) -> Point:
        """Where every run of the cell begins; measured once a process."""
        key = (self.reference_digest, self.proxy.digest, self.config.seed)
        if key not in _REFERENCES:
            _REFERENCES[key] = self.examine(self.reference)
        return _REFERENCES[key]

    def examine(
        self, policy: Network, seconds: float = 0.0, updates: int = 0, fresh: int = 0, selection: float | None = None
    ) -> Point:
        """Let it answer every prompt once at temperature 1."""
        draws = torch_generator(self.config.seed, "evaluation/answers")
        samples = sample_responses(policy, [p.token_ids for p in self.prompts], self._sampling, draws)
        pairs = list(zip(self.prompts, samples, strict=True))
        groups = [Group(prompt.token_ids, (sample.token_ids,)) for prompt, sample in pairs]
        questions = [Question(prompt, sample.token_ids) for prompt, sample in pairs]
        kl = sum(sequence_kl(policy, self.reference, groups, self.budget))
        tokens = sum(len(sample.token_ids) for sample in samples)
        proxy = (float(self.proxy.scores(questions).mean()) - self.proxy.mean) / max(self.proxy.std, 1e-6)
        return Point(
            seconds=seconds, updates=updates, fresh=fresh, gold=float(self.gold.scores(questions).mean()), proxy=proxy,
            kl_ref=kl / max(tokens, 1), kl_ref_sequence=kl / len(samples), response_length=tokens / len(samples),
            eos_rate=sum(s.finished for s in samples) / len(samples), selection=selection,
        )  # fmt: skip


def read_split_of(materials: Materials, split: str) -> list[dict[str, object]]:
    """Rows of a split of the cell's snapshot."""
    assert materials.snapshot is not None
    return read_split(Path(materials.snapshot.path), split)

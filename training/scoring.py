"""One way to ask for rewards, whether a model or a function gives them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from configs.schema.models import ModelsConfig
from configs.schema.supervised import RewardConfig
from training.contract import FileRef
from training.data.schema import Message
from training.examples import Encoder, Prompt
from training.models.layout import Group
from training.models.reward_model import RewardModel
from training.models.tokenize import decode_response, eos_id
from training.recorder import Told, untold
from training.rewards.functions import resolve_reward_function
from training.runtime import pick_device, pick_dtype


@dataclass(frozen=True)
class Question:
    """One answer to be judged. Example: Question(prompt, (8, 9, 2))."""

    prompt: Prompt
    response_ids: tuple[int, ...]


class Scorer(Protocol):
    """Scores in the reward's own units; `mean` and `std` are those of held-out answers, for normalisation."""

    digest: str
    name: str
    mean: float
    std: float

    def scores(self, questions: Sequence[Question], told: Told = untold) -> NDArray[np.float32]:
        """[B] finite scores, higher is better. `told` counts answers."""


class ModelScorer:
    """A trained reward model. Answers go through its own tokenizer where that differs from the policy's."""

    def __init__(self, ref: FileRef, models: ModelsConfig, policy_tokenizer: Any, budget: int) -> None:
        device = pick_device()
        self.model = RewardModel.load(Path(ref.path), device=device, dtype=pick_dtype(models.dtype, device))
        self.digest, self.name = ref.sha256, "reward_model"
        self.mean, self.std = self.model.description.score_mean, self.model.description.score_std
        self.budget = budget
        self._policy_tokenizer = policy_tokenizer
        own = self.model.network.backbone.tokenizer
        self.encoder = Encoder(own, models)
        self._same_tokens = own.get_vocab() == policy_tokenizer.get_vocab()

    def scores(self, questions: Sequence[Question], told: Told = untold) -> NDArray[np.float32]:
        """One batched pass without gradients."""
        if not questions:
            return np.zeros(0, dtype=np.float32)
        groups = [self._group(question) for question in questions]
        return np.asarray(self.model.scores(groups, self.budget, told=told).numpy(), dtype=np.float32)

    def _group(self, question: Question) -> Group:
        if self._same_tokens:
            return Group(question.prompt.token_ids, (question.response_ids,))
        text = decode_response(self._policy_tokenizer, question.response_ids)
        prompt = self.encoder.prompt({**vars(question.prompt), "prompt": question.prompt.messages})
        finished = question.response_ids[-1:] == (eos_id(self._policy_tokenizer),)
        ids = self.encoder.response(text, finished).token_ids
        # Nothing but special tokens was said: what an empty answer is in these tokens.
        return Group(prompt.token_ids, (ids or self.encoder.response("").token_ids,))


class FunctionScorer:
    """A rule, such as an answer check. It sees text, never tokens."""

    mean, std = 0.0, 1.0

    def __init__(self, name: str, allowed: Sequence[str], policy_tokenizer: Any) -> None:
        self.function = resolve_reward_function(name, allowed)
        # Stored verdicts are kept by digest: a mended rule must judge anew.
        source = hashlib.sha256(inspect.getsource(inspect.getmodule(self.function) or self.function).encode())
        self.digest, self.name = f"function:{name}@{source.hexdigest()[:16]}", name
        self._tokenizer = policy_tokenizer

    def scores(self, questions: Sequence[Question], told: Told = untold) -> NDArray[np.float32]:
        """The rule's verdict on each answer."""
        found = np.asarray([self._score(question) for question in questions], dtype=np.float32)
        told(len(found))
        return found

    def _score(self, question: Question) -> float:
        prompt, answer = question.prompt, decode_response(self._tokenizer, question.response_ids)
        return self.function(as_stored(prompt.messages), answer, prompt.reference)


def as_stored(messages: Sequence[Mapping[str, str]]) -> list[Message]:
    """Chat turns as reward functions take them."""
    return [Message(role=message["role"], content=message["content"]) for message in messages]


def build_scorer(
    reward: RewardConfig, models: ModelsConfig, reward_model: FileRef | None, policy_tokenizer: Any
) -> Scorer:
    """The night's reward, as the config says."""
    if reward.kind == "function":
        assert reward.function is not None
        return FunctionScorer(reward.function, reward.allowed_functions, policy_tokenizer)
    assert reward_model is not None
    return ModelScorer(reward_model, models, policy_tokenizer, reward.max_tokens_per_microbatch)

"""How champion, challenger and reference are measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from configs.schema.base import BatchSize, NonNegative, NonNegativeInt, Prompts, Rows, Section, at_most


class EvaluationConfig(Section):
    """One job: same frozen prompts, same seed, same reward model for all three."""

    prompts: Prompts = 256
    """At most this many of the frozen evaluation prompts."""
    temperature: Annotated[NonNegative, at_most(100.0, "(a temperature)")] = 1.0
    """Sampling temperature of the answers; 0 is greedy."""
    batch_size: BatchSize = 128
    """Sequences generated side by side."""
    gold_function: str | None = None
    """Reward function that is the truth, where one exists (`quickstart`, `gsm8k`); reported as gold_reward."""
    perplexity_rows: Rows = 256
    """Held-out chosen texts for the perplexity."""
    bootstrap_samples: Annotated[int, Field(ge=200, le=100_000)] = 2_000
    """Resamples of the intervals."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Level of the intervals."""
    sample_answers: NonNegativeInt = 24
    """Answers old beside new that are kept for the reader."""

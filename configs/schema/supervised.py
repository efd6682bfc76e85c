"""The three supervised stages: sft, reward (teacher) and distill (student)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import (
    BatchSize,
    LearningRate,
    NonNegative,
    Positive,
    Rank,
    Rows,
    Section,
    Share,
    Steps,
    Tokens,
    UserPath,
    at_most,
)


class SupervisedConfig(Section):
    """What every supervised loop has: passes, batches, optimiser, schedule, adapter."""

    epochs: Annotated[float, Field(gt=0.0), at_most(1_000.0, "passes over the data")] = 1.0
    """Passes over the training rows; fractions are allowed."""
    batch_size: BatchSize = 64
    """Rows (pairs or responses) an optimiser step."""
    max_tokens_per_microbatch: Tokens = 8192
    """Token budget of one forward; a microbatch never exceeds it, a single row that does is an error naming the row."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, on matrices only."""
    warmup_ratio: Share = 0.05
    """Share of the optimiser steps that warm up linearly."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape after the warm-up; sized by the real number of optimiser steps."""
    max_grad_norm: Positive = 1.0
    """Gradient norm is clipped to this and logged before clipping."""
    lora_rank: Rank = 0
    """Rank of the LoRA adapter on all linear layers; 0 trains every weight."""
    lora_alpha: Positive = 32.0
    """LoRA scale numerator; the update is multiplied by alpha / rank."""
    lora_target_modules: str | list[str] = "all-linear"
    """PEFT target modules."""
    checkpoint_every: Steps = 50
    """Optimiser steps between two checkpoints."""
    eval_every: Steps = 50
    """Optimiser steps between two looks at the validation rows."""
    max_validation_rows: Rows = 512
    """At most this many validation rows a look."""


class SFTConfig(SupervisedConfig):
    """Next-token loss on chosen responses."""

    run: Literal["auto", "always", "never"] = "auto"
    """auto: only on the first night, and only when the base is no instruct model (no chat template); a champion's
    reference is kept for later nights."""


class RewardConfig(SupervisedConfig):
    """The teacher: Bradley-Terry on pairs; or a function instead of a model."""

    kind: Literal["model", "function"] = "model"
    """model: a Bradley-Terry scorer trained on pairs; function: a rule such as an answer check."""
    function: str | None = None
    """With kind function: `gsm8k`, `quickstart`, or `package.module:name` from `allowed_functions`."""
    allowed_functions: tuple[str, ...] = ()
    """Import paths that may be used as reward functions; nothing else is ever imported."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate of the backbone (or adapter) and head."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Believed share of flipped labels; the loss is the unbiased noisy-label form."""
    center_coef: NonNegative = 0.01
    """Weight of mean((chosen + rejected)^2), which keeps scores around zero."""
    ensemble_size: Annotated[int, Field(ge=1), at_most(64, "heads")] = 1
    """Score heads on one backbone, each trained on its own bootstrap of the pairs."""
    ensemble_aggregate: Literal["mean", "min", "mean_minus_variance", "mean_minus_std"] = "mean"
    """How the heads become one score; all but the mean are pessimistic against over-optimisation."""
    uncertainty_penalty: NonNegative = 1.0
    """lambda in mean - lambda x variance (or x standard deviation) of the heads."""

    collapse_loss_gap: Annotated[float, Field(ge=-1.0, le=0.69)] = 0.01
    """The held-out loss must be this far below ln 2, or the model counts as collapsed and the stage fails."""

    @model_validator(mode="after")
    def _function_named(self) -> RewardConfig:
        if self.kind == "function" and not self.function:
            raise ValueError(
                "reward.kind is function, but reward.function is empty; write `function: gsm8k` or an import path"
            )
        if self.kind == "model" and self.function:
            raise ValueError(
                "reward.function is set, but reward.kind is model; write `kind: function` or remove the function"
            )
        return self


class DistillConfig(SupervisedConfig):
    """The student: a small base plus LoRA that learns the teacher's margins and scores."""

    enabled: bool = True
    """false: the teacher itself is the reward model of the night."""
    lora_rank: Rank = 32
    """Rank of the student's adapter; 0 trains every weight of the student."""
    learning_rate: LearningRate = 1e-4
    """Peak learning rate of adapter and head."""
    temperature: Positive = 1.0
    """Margins are divided by this before the KL."""
    margin_weight: NonNegative = 1.0
    """Weight of the squared error of margins."""
    pointwise_weight: NonNegative = 0.5
    """Weight of the squared error of centred scores."""
    label_weight: NonNegative = 0.0
    """Weight of the Bradley-Terry loss on the labels themselves."""
    policy_pairs: Annotated[int, Field(ge=0), at_most(10_000_000, "prompts")] = 0
    """Training prompts that the reference policy answers twice; the teacher's scores of those are learnt too."""
    continue_from: UserPath | None = None
    """Folder with `adapter_model.safetensors` and score head to continue from; `champion`: the last night's student."""
    max_student_teacher_kl: Positive | None = 0.05
    """Held-out student-teacher KL in nats above which the stage fails; null only reports it."""
    min_accuracy_retained: Annotated[float, Field(gt=0.0, le=1.0)] | None = 0.95
    """The stage fails when the student surely keeps less than this share of the teacher's held-out accuracy (the upper
    bound of its 95 % interval is below); null only reports it."""
    collapse_loss_gap: Annotated[float, Field(ge=-1.0, le=0.69)] = 0.01
    """The student's held-out loss must be this far below ln 2, or it counts as collapsed and the stage fails."""

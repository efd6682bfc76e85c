"""Guards: rules that watch every training step, as data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import LearningRate, NonNegativeInt, Positive, Prompts, Rows, Section, Steps


class Mitigation(Section):
    """What changes after a rollback, or instead of one."""

    kind: Literal["reduce_lr", "reduce_clip", "none"]
    """reduce_lr: multiply both learning rates; reduce_clip: lower the PPO clip; none: only restore."""
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """With reduce_lr: the multiplier."""
    floor: LearningRate = 1e-7
    """With reduce_lr: the actor's rate never goes below this."""
    to: Positive = 0.1
    """With reduce_clip: the new clip_ratio."""


class GuardRule(Section):
    """`metric op threshold`, over a window, patiently, then an action."""

    name: str | None = None
    """How reports call the rule, no two alike; null: made from metric and threshold."""
    metric: str
    """A step metric of the stage, e.g. kl_ref, grad_norm, response_length."""
    op: Literal[">", ">=", "<", "<=", "nonfinite"] = ">"
    """Comparison that fires; nonfinite fires on NaN and infinities and needs no threshold."""
    threshold: float | None = None
    """The limit; with `relative_to` a multiple of that reference (above_baseline: what is added to it)."""
    relative_to: Literal["baseline", "above_baseline", "running_median"] | None = None
    """baseline: a multiple of the metric before the first step, which must be above 0 there, or the stage ends with an
    error (kl_ref begins at 0, rewards may be negative); above_baseline: that metric plus the threshold, which
    is a limit where it begins at 0 too (a share gets three standard errors of its count, where that is more);
    running_median: a multiple of the median of the last `window` values."""
    window: Steps = 1
    """Values averaged before comparing (or in the running median)."""
    patience: Steps = 1
    """Consecutive breaches before the rule fires."""
    action: Literal["warn", "reduce_lr", "reduce_clip", "rollback", "stop"] = "warn"
    """What happens when it fires."""
    max_rollbacks: NonNegativeInt = 2
    """With rollback: how often, before the stage fails with the reason."""
    then: Mitigation = Mitigation(kind="reduce_lr")
    """Mitigation after a rollback, or the setting of reduce_lr / reduce_clip."""

    @model_validator(mode="after")
    def _threshold_there(self) -> GuardRule:
        if self.op != "nonfinite" and self.threshold is None:
            raise ValueError(f"guard on {self.metric}: write a threshold (only op nonfinite goes without)")
        if self.action in ("reduce_lr", "reduce_clip") and self.then.kind not in (self.action, "none"):
            raise ValueError(f"guard on {self.metric}: action {self.action} needs then.kind {self.action}")
        return self

    @property
    def needs_baseline(self) -> bool:
        """Whether it is held against what the metric was before the first step."""
        return self.relative_to in ("baseline", "above_baseline")

    @property
    def label(self) -> str:
        """The rule's name in reports."""
        limit = "" if self.threshold is None else str(self.threshold)
        if self.relative_to == "above_baseline":
            limit = f"baseline + {limit}"
        return self.name or f"{self.metric} {self.op} {limit}".strip()


def default_rules() -> list[GuardRule]:
    """The limits that users come with (stable preset)."""
    halve = Mitigation(kind="reduce_lr")
    # A rate that runs away may be a hundred times too high: two rollbacks must be enough to bring it back.
    tenth = Mitigation(kind="reduce_lr", factor=0.1)
    return [
        GuardRule(metric="loss", op="nonfinite", action="rollback", then=halve),
        GuardRule(metric="grad_norm", op="nonfinite", action="rollback", then=halve),
        GuardRule(metric="critic_grad_norm", op="nonfinite", action="rollback", then=halve),
        # A score of a sound judge lies beyond five standard deviations next to never, so a round in which many do is
        # damaged. A judge without a scale (all held-out scores alike, a toy, a function in percent) clips the answers
        # of the policy that comes in as well: that is no fault of this night's updates, and taking them back mends
        # nothing. So what was clipped before the first step is where the limit begins, and the rest is only told.
        # Stored answers are held against the same limit, since it was measured on answers judged tonight.
        GuardRule(metric="reward_clip_frac", op=">", threshold=0.1, action="warn"),
        GuardRule(
            metric="reward_clip_frac",
            op=">",
            threshold=0.1,
            relative_to="above_baseline",
            action="rollback",
            then=halve,
        ),
        GuardRule(metric="kl_ref", op=">", threshold=0.2, action="warn"),
        GuardRule(metric="kl_ref", op=">", threshold=0.3, action="rollback", then=tenth),
        GuardRule(metric="advantage_variance", op="<", threshold=0.1, action="warn"),
        GuardRule(metric="effective_sample_fraction", op="<", threshold=0.8, action="warn"),
        GuardRule(metric="kl_behavior", op=">", threshold=0.02, action="warn"),
        GuardRule(
            name="response_length doubled",
            metric="response_length",
            op=">",
            threshold=2.0,
            relative_to="running_median",
            window=8,
            action="warn",
        ),
        GuardRule(
            name="response_length stays doubled",
            metric="response_length",
            op=">",
            threshold=2.0,
            relative_to="running_median",
            window=8,
            patience=3,
            action="rollback",
            then=halve,
        ),
        GuardRule(
            metric="response_length", op="<", threshold=0.3, relative_to="baseline", action="rollback", then=halve
        ),
        GuardRule(metric="perplexity", op=">", threshold=1.2, relative_to="baseline", action="rollback", then=halve),
    ]


class GuardsConfig(Section):
    """The rules, and how often the dearer metrics are measured."""

    kl_probe_prompts: Prompts = 32
    """Prompts from which the real KL to the reference is estimated with fresh samples."""
    kl_probe_steps: Steps = 20
    """Optimiser steps between two probes inside a round; one more at each round's end."""
    perplexity_steps: Steps = 500
    """Optimiser steps between two looks at held-out perplexity; one more at the end."""
    perplexity_rows: Rows = 64
    """Held-out chosen texts for the perplexity."""
    rules: list[GuardRule] = Field(default_factory=default_rules)
    """The rules, in order."""

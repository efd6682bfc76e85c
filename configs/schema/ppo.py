"""Fresh samples, replay and PPO. Leaf names follow verl where verl has the thing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import (
    BatchSize,
    LearningRate,
    Nights,
    NonNegative,
    NonNegativeInt,
    Passes,
    Positive,
    Prompts,
    Rank,
    Rounds,
    Section,
    Share,
    Steps,
    Tokens,
    at_most,
)

KLKind = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


class RolloutConfig(Section):
    """Fresh samples from the current policy, beside the stored trajectories."""

    n: Annotated[int, Field(ge=0), at_most(1_000, "responses a prompt")] = 5
    """Responses a prompt each round; 0 trains on stored trajectories alone."""
    prompts_per_round: Prompts = 64
    """Training prompts sampled each round."""
    temperature: Annotated[Positive, at_most(100.0, "(a temperature)")] = 1.0
    """Sampling temperature; stored beside the recorded log-probs, which are of the distribution really sampled."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus mass; 1 turns it off."""
    top_k: Annotated[int, Field(ge=0), at_most(10_000_000, "tokens")] = 0
    """Keep the k likeliest tokens; 0 turns it off."""
    batch_size: BatchSize = 128
    """Sequences generated side by side."""


class ReplayConfig(Section):
    """The trajectory store and what is drawn from it."""

    capacity: Annotated[int, Field(ge=1, le=10_000_000)] = 50_000
    """Trajectories kept; the oldest go first."""
    max_age_nights: Nights = 30
    """Trajectories older than this many nights are evicted."""
    prioritized: bool = True
    """Draw by |TD error|; false draws evenly."""
    alpha: NonNegative = 0.6
    """Priority exponent: P(i) proportional to p_i^alpha."""
    beta_start: Share = 0.4
    """Bias correction at the first step: w = (N P)^-beta."""
    beta_end: Share = 1.0
    """Bias correction at the last step."""
    eps: Positive = 1e-3
    """Added to |TD error|, so that nothing is never drawn."""
    refresh_steps: Steps = 100
    """Optimiser steps between two recomputations of the TD errors of the open round's answers, within it. Those that a
    round takes are recomputed at its start in any case, so that a night of fewer steps has no other."""
    filter: Literal["none", "best_random", "best_worst", "power"] = "best_worst"
    """PF-PPO filter within each prompt's answers; weights multiply the priorities."""
    filter_power: Positive = 2.0
    """Exponent of the `power` filter."""
    importance_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Granularity of the weight old policy / writer of the data."""
    importance_mode: Literal["truncate", "clip_to", "mask"] = "clip_to"
    """truncate: min(w, threshold); clip_to: above the threshold becomes `importance_clip_to`; mask: outside is 0."""
    importance_threshold: Annotated[float, Field(gt=1.0), at_most(1e6, "(a ratio)")] = 1.5
    """Ratio above which a weight is tamed."""
    importance_clip_to: Positive = 1.2
    """Value that a weight above the threshold gets in mode clip_to."""
    importance_weights: bool = True
    """false: every weight is 1."""
    stored_share: Share = 0.5
    """Share of a round's trajectories drawn from the store when there are fresh samples too."""


class KLControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "adaptive"
    """adaptive follows the measured KL to the reference."""
    kl_coef: NonNegative = 0.05
    """Coefficient at the start."""
    target_kl: Positive = 0.1
    """KL to the reference, nats a token, that the adaptive controller steers to."""
    horizon: Positive = 2_000.0
    """Trajectories over which a full correction is spread."""


class PPOConfig(Section):
    """The actor-critic rounds."""

    rounds: Rounds = 4
    """Rounds of: refresh trajectories, choose, fix the old policy, several epochs."""
    train_batch_size: BatchSize = 256
    """Trajectories a round."""
    ppo_mini_batch_size: BatchSize = 64
    """Trajectories an optimiser step."""
    ppo_max_token_len: Tokens = 9_216
    """Token budget of a microbatch; never exceeded. verl: ppo_max_token_len_per_gpu, 3 x (prompt + response)."""
    use_dynamic_bsz: bool = True
    """true: a microbatch is filled up to the token budget; false: it holds ppo_micro_batch_size, within the budget."""
    ppo_micro_batch_size: BatchSize = 2
    """Trajectories a microbatch where use_dynamic_bsz is false; small against running out of memory."""
    ppo_epochs: Passes = 4
    """Passes over a round's trajectories."""
    actor_lr: LearningRate = 1e-6
    """Learning rate of the policy."""
    critic_lr: LearningRate = 1e-5
    """Learning rate of the critic."""
    critic_warmup_rounds: NonNegativeInt = 1
    """Rounds at the start in which only the critic learns."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; sized by the real number of optimiser steps."""
    warmup_ratio: Share = 0.0
    """Share of the optimiser steps that warm up linearly."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    adv_estimator: Literal["gae"] = "gae"
    """How advantages are estimated: generalised advantage estimation with a critic is the one way there is."""
    gamma: Share = 1.0
    """Discount."""
    lam: Share = 0.95
    """GAE lambda."""
    clip_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """PPO clip, both sides."""
    clip_ratio_high: Positive | None = None
    """Upper clip where it differs from `clip_ratio`."""
    clip_ratio_c: Annotated[float, Field(gt=1.0), at_most(1e6, "(a ratio)")] | None = 3.0
    """Dual clip bound for negative advantages; null turns it off."""
    cliprange_value: Positive = 0.5
    """Value clip around the old values."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses become one number."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus."""
    use_kl_in_reward: bool = True
    """Subtract kl_coef x KL from each token's reward."""
    kl_penalty: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    """Controller of the coefficient of the KL in the reward."""
    use_kl_loss: bool = False
    """Add kl_loss_coef x KL to the policy loss."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: KLKind = "k3"
    """Estimator of the KL in the loss; a trailing + takes the straight-through gradient of k2."""
    max_grad_norm: Positive = 1.0
    """Gradient norm is clipped to this, for actor and critic each."""
    lora_rank: Rank = 32
    """Rank of the policy's adapter; 0 trains every weight."""
    lora_alpha: Positive = 64.0
    """LoRA scale numerator of the policy's adapter."""
    critic_lora_rank: Rank | None = None
    """Rank of the critic's adapter; null: the policy's."""
    normalize_reward: bool = True
    """Shift and scale scores by the reward model's stored mean and standard deviation."""
    reward_clip: Positive | None = 5.0
    """Normalised scores are clipped to +- this; null turns it off."""
    missing_eos_penalty: NonNegative = 1.0
    """Subtracted from the score of a response without EOS."""
    overlong_buffer: Annotated[int, Field(ge=0), at_most(10_000_000, "tokens")] = 0
    """Tokens before max_response_length over which a linear penalty rises; 0 turns it off."""
    overlong_penalty: NonNegative = 1.0
    """Penalty at max_response_length."""
    max_approx_kl: Positive | None = 0.1
    """End the round early when the mean approximate KL to the round's old policy exceeds this; null turns it off."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Exponential moving average of the policy, which is then what is chosen by and saved; null turns it off. Guards
    and the KL controller see the current policy; the average's own looks are recorded as ema/kl_ref and so on."""
    checkpoint_every: Steps = 50
    """Optimiser steps between two checkpoints inside a round; one more at each round's end."""
    select_best: bool = True
    """Hand on the round with the best held-out pessimistic reward instead of the last one."""
    selection_prompts: Prompts = 128
    """Held-out prompts that each round's policy answers for selection."""
    selection_kl_cost: NonNegative = 1.0
    """Reward standard deviations that one nat a token of KL to the reference costs in the selection."""

    @property
    def clip_ratio_upper(self) -> float:
        """The upper clip that is really used."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @model_validator(mode="after")
    def _sizes_fit(self) -> PPOConfig:
        if self.ppo_mini_batch_size > self.train_batch_size:
            raise ValueError(
                f"ppo.ppo_mini_batch_size ({self.ppo_mini_batch_size}) exceeds ppo.train_batch_size "
                f"({self.train_batch_size}); write at most the batch"
            )
        if self.train_batch_size > 5 * self.kl_ctrl.horizon:
            raise ValueError(
                f"ppo.kl_ctrl.horizon ({self.kl_ctrl.horizon:g}) is too short for ppo.train_batch_size "
                f"({self.train_batch_size}): one update could turn the coefficient negative; "
                "write at least a fifth of it"
            )
        if self.critic_warmup_rounds >= self.rounds:
            raise ValueError(
                f"ppo.critic_warmup_rounds ({self.critic_warmup_rounds}) leaves no round for the policy; "
                f"write fewer than ppo.rounds ({self.rounds})"
            )
        return self

"""Objectives: pure functions on tensors, importing only torch.

Alphabet: B trajectories, R response positions, T prompt and response positions, V vocabulary, P preference pairs. Masks
are bool and True participates. Logarithms are natural, KL is in nats, every loss and statistic is float32. Masked slots
may hold NaN; masked slots of every output are 0, and an empty mask gives 0. Sums are divided by global counts that are
passed in, so splitting a minibatch changes neither loss, gradient nor metric. Errors are TypeError (dtype) and
ValueError (shape, range).
"""

from training.objectives.advantages import gae
from training.objectives.aggregate import AGGREGATION_MODES, aggregate
from training.objectives.distill_loss import DistillTerms, distill_loss, distill_terms, preference_kl
from training.objectives.kl import KL_KINDS, kl_penalty
from training.objectives.kl_control import AdaptiveKLController, FixedKLController
from training.objectives.log_probs import IGNORE_INDEX, token_entropy, token_log_probs
from training.objectives.masked import masked_mean, masked_var, masked_whiten
from training.objectives.policy_loss import PolicyLoss, policy_loss
from training.objectives.preference_loss import bradley_terry_loss
from training.objectives.rewards import token_level_rewards
from training.objectives.value_fit import ValueFit, value_fit
from training.objectives.value_loss import ValueLoss, value_loss

__all__ = [
    "AGGREGATION_MODES",
    "IGNORE_INDEX",
    "KL_KINDS",
    "AdaptiveKLController",
    "DistillTerms",
    "FixedKLController",
    "PolicyLoss",
    "ValueFit",
    "ValueLoss",
    "aggregate",
    "bradley_terry_loss",
    "distill_loss",
    "distill_terms",
    "gae",
    "kl_penalty",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "policy_loss",
    "preference_kl",
    "token_entropy",
    "token_level_rewards",
    "token_log_probs",
    "value_fit",
    "value_loss",
]

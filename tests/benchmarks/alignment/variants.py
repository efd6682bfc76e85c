"""What is compared, as data: config values over configs/quickstart.yaml, and DPO's choice of learning rates."""

from __future__ import annotations

from dataclasses import dataclass

DPO_RATES = (2e-5, 5e-5, 1e-4)


SCALES: dict[str, tuple[str, ...]] = {
    "shipped": (),
    "compact": (
        "models.quickstart_hidden_size=64", "models.quickstart_layers=4", "data.quickstart.pairs_per_night=1500",
        "data.evaluation_fraction=0.25",
    ),
}  # fmt: skip
"""Size of the task, all settings being the quickstart's. compact: a fifth of the weights, half of the training pairs,
as many evaluation prompts; some eight times less work, so that many seeds fit into an hour."""


@dataclass(frozen=True)
class Variant:
    """A PPO run. `overrides` are key=value as on the command line; `reward` names the reward model it trains against;
    `budget` is a multiple of the grid's."""

    name: str
    label: str
    overrides: tuple[str, ...] = ()
    reward: str = "default"
    budget: float = 1.0


REWARDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "single": ("reward.ensemble_size=1",),
    "minimum": ("reward.ensemble_size=5", "reward.ensemble_aggregate=min"),
    "pessimistic": ("reward.ensemble_size=5", "reward.ensemble_aggregate=mean_minus_std"),
}
"""Reward models by name, as overrides of the reward and distill sections."""

_TWICE = ("replay.stored_share=0.3", "ppo.rounds=7", "ppo.train_batch_size=192", "ppo.ppo_epochs=2")
"""Smaller rounds that use each answer twice: what the quickstart shipped before, and what filters are compared on."""
_STORED = (*_TWICE, "rollout.n=0", "ppo.rounds=18")
_PLAIN = (*_STORED, "replay.filter=none", "replay.importance_weights=false", "replay.prioritized=false")
_WEIGHTED = (*_STORED, "replay.filter=none", "replay.importance_weights=true", "replay.prioritized=false")
_REPLAY = (*_STORED, "replay.filter=none", "replay.importance_weights=true", "replay.prioritized=true")

CHAIN = (
    Variant("offline", "offline PPO, stored answers alone", _PLAIN),
    Variant("weights", "+ importance weights", _WEIGHTED),
    Variant("replay", "+ prioritised replay", _REPLAY),
    Variant("best_random", "+ PF filter best + random", (*_REPLAY, "replay.filter=best_random")),
    Variant("best_worst", "+ PF filter best + worst", (*_REPLAY, "replay.filter=best_worst")),
    Variant("power", "+ PF filter power", (*_REPLAY, "replay.filter=power")),
)
"""Each line adds to the one above; of the filters each to prioritised replay."""

FRESH = (
    Variant("fresh", "+ fresh samples, no filter", (*_TWICE, "replay.filter=none")),
    Variant("filtered", "+ fresh samples, best + worst (shipped before)", (*_TWICE, "replay.filter=best_worst")),
    Variant(
        "adapter",
        "default, an adapter trained instead of every weight",
        ("ppo.lora_rank=16", "ppo.lora_alpha=32", "ppo.actor_lr=5e-4", "ppo.critic_lr=1e-3"),
    ),
)

MAIN = (Variant("default", "shipped default: each answer three times, no filter"), *FRESH, *CHAIN)
"""The table of the main comparison, most telling first."""

FILTERS = (
    Variant("fresh_best_random", "fresh samples, best + random", (*_TWICE, "replay.filter=best_random")),
    Variant("fresh_power", "fresh samples, power", (*_TWICE, "replay.filter=power")),
)
"""Filters where they have something to choose from: five fresh answers a prompt."""

_ONCE = (
    "replay.filter=none", "replay.stored_share=0", "ppo.rounds=7", "ppo.train_batch_size=320",
    "ppo.ppo_mini_batch_size=64",
)  # fmt: skip
REUSE = (
    Variant("once", "each fresh sample used once", (*_ONCE, "ppo.ppo_epochs=1")),
    Variant("epochs", "each fresh sample used in three epochs", (*_ONCE, "ppo.ppo_epochs=3")),
)
"""What using a sample again is worth; the default does so too, with half as many stored answers beside."""

_UNBOUND = (
    *_TWICE, "replay.filter=best_worst", "ppo.rounds=24", "ppo.kl_ctrl.type=fixed", "ppo.kl_ctrl.kl_coef=0.0",
    "ppo.select_best=false", "guards.rules=[]",
)  # fmt: skip
OVEROPTIMISE = (
    Variant("over_single", "one head", _UNBOUND, "single", 2.0),
    Variant("over_minimum", "five heads, minimum", _UNBOUND, "minimum", 2.0),
    Variant("over_pessimistic", "five heads, mean - std", _UNBOUND, "pessimistic", 2.0),
)
"""No brake at all: how far does gold follow the reward model that is being climbed?"""

ALL = {variant.name: variant for variant in (*MAIN, *FILTERS, *REUSE, *OVEROPTIMISE)}
GROUPS = {"main": MAIN, "filters": FILTERS, "reuse": REUSE, "overoptimise": OVEROPTIMISE}


def dpo_name(rate: float) -> str:
    """The name of DPO at a learning rate, e.g. dpo_1e-04."""
    return f"dpo_{rate:.0e}"


def label_of(name: str) -> str:
    """How tables call a variant."""
    if name.startswith("dpo_"):
        return f"DPO (TRL), learning rate {float(name.removeprefix('dpo_')):g}"
    return ALL[name].label if name in ALL else name

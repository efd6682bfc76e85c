"""PPO loops under guards, and what a rollback must have put back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from configs.schema.guards import GuardRule, GuardsConfig, Mitigation
from tests.training.ppo.conftest import BuildLoop
from tests.training.ppo.test_loop import events, steps
from tests.training.stages import GUARDS, PPO
from training.checkpoint import Checkpoint
from training.ppo.loop import PPOLoop

LIMIT = 0.03  # nats a token: so small a model cannot go much further
LONG = PPO.model_copy(update={"rounds": 4, "select_best": False})
HALVE = Mitigation(kind="reduce_lr", factor=0.5)


def guarded(*rules: GuardRule, **changes: Any) -> GuardsConfig:
    return GUARDS.model_copy(update={"rules": list(rules)} | changes)


@dataclass
class Watch:
    """Compares the state with the last good one at each rollback, just before the next round."""

    loop: PPOLoop
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.skip = self.loop._skip_round
        self.loop._skip_round = self.compare

    def compare(self) -> None:
        state = self.loop.state
        good = self.loop.parts.good.at(state.cursor.good_step)
        assert_restored(state.tensors(), good)
        now = state.state()
        for name in ("kl", "best"):
            assert now[name] == good.state[name]
        for name in ("actor", "critic"):
            assert now[name]["steps_done"] == good.state[name]["steps_done"]
        assert now["cursor"]["applied"] == good.state["cursor"]["applied"]
        assert state.batch is None
        assert len(state.pool) <= state.sampler.capacity
        self.seen.append(good.step)
        self.skip()


def assert_restored(tensors: dict[str, torch.Tensor], good: Checkpoint) -> None:
    assert tensors.keys() == good.tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, good.tensors[name]), name


def watched(build_loop: BuildLoop, *rules: GuardRule, name: str = "ppo", **sections: Any) -> tuple[PPOLoop, Watch]:
    loop = build_loop(name, **{"ppo": LONG, "guards": guarded(*rules)} | sections)
    return loop, Watch(loop)


def fired(loop: PPOLoop) -> list[str]:
    return [event["rule"] for event in events(loop, "guard")]


def assert_sound(loop: PPOLoop) -> None:
    assert loop.state.cursor.round == loop.ppo.rounds, "training did not go on"
    assert loop.state.cursor.applied > 0
    assert all(torch.isfinite(t).all() for t in loop.state.policy.tensors().values())
    numbers = [line["step"] for line in steps(loop)]
    assert numbers == list(range(1, len(numbers) + 1)), "steps are counted on, never again"


def later(patience: int, action: str, then: Mitigation, name: str | None = None) -> GuardRule:
    """A rule that fires at the `patience`-th step of the policy: 5 is the first of round 2, 6 the second."""
    return GuardRule(
        metric="approx_kl",
        op="<",
        threshold=1e9,
        patience=patience,
        action=action,
        then=then,
        max_rollbacks=9,
        name=name,
    )

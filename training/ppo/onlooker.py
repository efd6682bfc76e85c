"""When a run looks at its policy from outside, on how many prompts, and what it then knows of which weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema.guards import GuardsConfig
from configs.schema.ppo import PPOConfig
from training.ppo.probe import Probe, Prober, selection_score
from training.ppo.state import AveragedPolicy, PPOState

SCORE = "selection_score"


@dataclass(frozen=True)
class RoundsEnd:
    """Two looks, the same one where no average of the policy is kept.

    `current`: the policy that learns on; guards and KL controller judge it, for it is what a rollback restores.
    `handed_on`: the weights that would leave the stage; the best round is chosen by their `selection_score`.
    """

    current: dict[str, float]
    handed_on: dict[str, float]

    @property
    def recorded(self) -> dict[str, float]:
        """As step metrics: an average under names of its own, and the score of what would be handed on."""
        if self.handed_on is self.current:
            return self.current
        average = {f"ema/{name}": value for name, value in self.handed_on.items() if name != SCORE}
        return self.current | average | {SCORE: self.handed_on[SCORE]}


class Onlooker:
    """Asks the prober. Random numbers are the probes' own, so that looking changes nothing."""

    def __init__(self, state: PPOState, prober: Prober, ppo: PPOConfig, guards: GuardsConfig) -> None:
        self.state, self.prober, self.ppo, self.guards = state, prober, ppo, guards

    @property
    def prompts(self) -> int:
        """How many are asked before the first round and at each one's end."""
        return self.ppo.selection_prompts if self.ppo.select_best else self.guards.kl_probe_prompts

    def before(self) -> tuple[Probe, dict[str, float]]:
        """The policy as it came: its probe, and the metrics that have a baseline."""
        probe = self.prober.measure(self.prompts)
        return probe, probe.metrics() | self.prober.perplexity()

    def before_within(self, probe: Probe) -> dict[str, float]:
        """The same of as few prompts as a look within a round asks, whose answers may be longer or better by nature."""
        fewer = self.guards.kl_probe_prompts
        return (probe if fewer == self.prompts else self.prober.measure(fewer)).metrics()

    def within_round(self, step: int) -> dict[str, float]:
        """What is due after this step."""
        due = step % self.guards.kl_probe_steps == 0
        found = self.prober.measure(self.guards.kl_probe_prompts).metrics() if due else {}
        return found | self.texts_due(step)

    def texts_due(self, step: int) -> dict[str, float]:
        """Perplexity, where it is due after this step."""
        return self.prober.perplexity() if step % self.guards.perplexity_steps == 0 else {}

    def after_round(self, is_last: bool) -> RoundsEnd:
        """After a round of the policy; the last one's texts are read in any case."""
        current = self._look(is_last)
        if self.ppo.ema_decay is None:
            return RoundsEnd(current, current)
        with self.averaged():
            return RoundsEnd(current, self._look(is_last))

    def after_warmup(self, baseline: Mapping[str, float]) -> RoundsEnd:
        """After a round of the critic alone: the policy stands still, and what was measured before the first step, with
        the same prompts and draws, holds."""
        unmoved = {name: baseline.get(name, math.nan) for name in Probe.measured()}
        return RoundsEnd(unmoved, unmoved)

    def averaged(self) -> AveragedPolicy:
        """What would be handed on, in place of the current policy while the context lasts."""
        return AveragedPolicy(self.state, enabled=self.ppo.ema_decay is not None)

    def _look(self, with_texts: bool) -> dict[str, float]:
        probe = self.prober.measure(self.prompts)
        metrics = probe.metrics() | (self.prober.perplexity() if with_texts else {})
        return metrics | {SCORE: selection_score(probe, self.ppo)}

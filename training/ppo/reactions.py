"""What follows when a guard fires: the gentler actions at once, then at most one rollback, then a stop."""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema.ppo import PPOConfig
from training.checkpoint import Checkpoint, CheckpointFolder
from training.errors import GuardStop
from training.guards import Firing, GuardMonitor
from training.ppo.state import PPOState
from training.recorder import Recorder


class RolledBack(Exception):
    """The last good state is back; the rest of this round is given up."""


class GuardReactions:
    """Carries out what fired, on the state of the run. Each act is an event in the metrics file."""

    def __init__(
        self, state: PPOState, guards: GuardMonitor, good: CheckpointFolder, ppo: PPOConfig, recorder: Recorder
    ) -> None:
        self.state, self.guards, self.good, self.ppo, self.recorder = state, guards, good, ppo, recorder

    def act(self, firings: Sequence[Firing], round_is_over: bool = False) -> None:
        """Mitigate, then stop or roll back. Raises GuardStop, and RolledBack once the last good state is in place."""
        for firing in firings:
            self.recorder.event(
                "guard", step=firing.step, rule=firing.rule.label, action=firing.rule.action,
                value=firing.value, sentence=firing.sentence,
            )  # fmt: skip
            if firing.rule.action in ("reduce_lr", "reduce_clip"):
                self._mitigate(firing)
        for firing in firings:
            if firing.rule.action == "stop":
                raise GuardStop(f"ppo: stopped by a guard: {firing.sentence}", "look at the curves before the stop")
        rollbacks = [firing for firing in firings if firing.rule.action == "rollback"]
        if rollbacks:
            self._roll_back(rollbacks[0], round_is_over)

    def _mitigate(self, firing: Firing) -> None:
        then, cursor = firing.rule.then, self.state.cursor
        if then.kind == "reduce_lr":
            floor = then.floor / self.ppo.actor_lr
            for engine in (self.state.actor, self.state.critic_engine):
                engine.lr_scale = min(engine.lr_scale, max(engine.lr_scale * then.factor, floor))
        elif then.kind == "reduce_clip":
            cursor.clip_ratio_low = min(cursor.clip_ratio_low, then.to)
            cursor.clip_ratio_high = min(cursor.clip_ratio_high, then.to)
        self.recorder.event("mitigation", step=firing.step, kind=then.kind, rule=firing.rule.label)

    def _roll_back(self, firing: Firing, round_is_over: bool) -> None:
        self._count_rollback(firing)
        was_at, given_up = self.state.cursor.step, self.state.cursor.round - int(round_is_over)
        self._restore()
        cursor = self.state.cursor
        good_step = cursor.step
        cursor.step, cursor.round = was_at, given_up
        self._mitigate(firing)
        self.guards.forget_recent()
        self.recorder.event(
            "rollback", step=was_at, to_step=good_step, round=given_up, rule=firing.rule.label, sentence=firing.sentence
        )
        raise RolledBack

    def _count_rollback(self, firing: Firing) -> None:
        self.guards.rollbacks[firing.index] += 1
        if self.guards.rollbacks[firing.index] > firing.rule.max_rollbacks:
            raise GuardStop(
                f"ppo: rolled back {firing.rule.max_rollbacks} times and still: {firing.sentence}",
                "lower ppo.actor_lr, raise ppo.kl_ctrl.kl_coef, or look at the data of the last rounds",
            )

    def _restore(self) -> None:
        """The last good state. Mitigations taken since stay taken; only what was learnt since is undone."""
        state = self.state
        scales = (state.actor.lr_scale, state.critic_engine.lr_scale)
        clips = (state.cursor.clip_ratio_low, state.cursor.clip_ratio_high)
        state.load(self._last_good())
        state.actor.lr_scale = min(state.actor.lr_scale, scales[0])
        state.critic_engine.lr_scale = min(state.critic_engine.lr_scale, scales[1])
        state.cursor.clip_ratio_low = min(state.cursor.clip_ratio_low, clips[0])
        state.cursor.clip_ratio_high = min(state.cursor.clip_ratio_high, clips[1])

    def _last_good(self) -> Checkpoint:
        """The newest good state that is whole; one that was torn or tampered with is told of and passed over."""
        found = self.good.latest(up_to=self.state.cursor.good_step)
        for reason in self.good.refused:
            self.recorder.event("checkpoint_refused", reason=reason)
        if found is None:
            raise GuardStop(
                f"ppo: no good state in {self.good.folder} is whole, there is nothing to roll back to",
                "look for what writes into the stage's folder, and run the stage again in a fresh one",
            )
        return found

"""Offline PPO, told once: rounds of fresh and stored answers, several epochs each, under guards.

1. sample n fresh answers a prompt from the current policy
2. choose the round's answers: filter weights x priorities
3. fix the old policy and the old values
4. shape scores, place them on tokens with the KL, estimate advantages, whiten over the round
5. several epochs of minibatches; guards look at every step
6. refresh priorities now and then
7. at the round's end: probe, KL controller, keep the best round, checkpoint
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from configs.schema.guards import GuardsConfig
from configs.schema.ppo import PPOConfig, ReplayConfig
from training.checkpoint import CheckpointFolder
from training.context import StageContext
from training.errors import StageError
from training.guards import GuardMonitor
from training.ppo.onlooker import SCORE, Onlooker
from training.ppo.probe import Probe, Prober, selection_score
from training.ppo.reactions import GuardReactions, RolledBack
from training.ppo.rollout import RolloutWorker
from training.ppo.rounds import RoundMaker, minibatch_rows
from training.ppo.shaping import Share, clipped_share
from training.ppo.state import PPOState, update_ema
from training.ppo.update import Updater, UpdateSettings
from training.scoring import FunctionScorer
from training.seeding import torch_generator


@dataclass
class Parts:
    """What the loop calls on; each is one concern."""

    state: PPOState
    updater: Updater
    maker: RoundMaker
    rollouts: RolloutWorker | None
    prober: Prober
    guards: GuardMonitor
    checkpoints: CheckpointFolder
    good: CheckpointFolder


class PPOLoop:
    """Runs the rounds. All that changes lives in `parts.state` and `parts.guards`."""

    def __init__(
        self, parts: Parts, ppo: PPOConfig, replay: ReplayConfig, guards: GuardsConfig, context: StageContext,
        checkpoint_every: int,
    ) -> None:  # fmt: skip
        self.parts, self.ppo, self.replay, self.guards, self.context = parts, ppo, replay, guards, context
        self.checkpoint_every = checkpoint_every
        self.reactions = GuardReactions(parts.state, parts.guards, parts.good, ppo, context.recorder)
        self.onlooker = Onlooker(parts.state, parts.prober, ppo, guards)
        self.round_metrics: dict[str, float] = {}
        self.round_samples: dict[str, int] = {}  # read at a round's first step, before which there is no checkpoint

    @property
    def state(self) -> PPOState:
        """The mutable state."""
        return self.parts.state

    def run(self) -> None:
        """Train to the end and leave the best round's policy in place. Raises StageError, GuardStop."""
        resumed = self._resume()
        self.parts.updater.world.barrier()  # the main rank must not write a checkpoint that another still looks for
        if not resumed:
            self._begin()
        while self.state.cursor.round < self.ppo.rounds:
            try:
                self._round()
                self._end_round()
            except RolledBack:
                self._skip_round()
        self._finish()

    # -- a round -------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        cursor = self.state.cursor
        if self.state.batch is None:
            self._open_round()
        assert self.state.batch is not None
        plan = self._plan(cursor.round, len(self.state.batch.indices))
        experiences = self.state.pool.take(self.state.batch.indices.tolist())
        while cursor.step_in_round < len(plan) and not cursor.round_over:
            batch = self.parts.updater.minibatch(plan[cursor.step_in_round], experiences)
            metrics = self.parts.updater.step(batch, self.state.batch, self._settings())
            self._after_step(metrics)

    def _open_round(self) -> None:
        cursor = self.state.cursor
        fresh = np.zeros(0, dtype=np.int64)
        if self.parts.rollouts is not None:
            experiences = self.parts.rollouts.collect(cursor.round)
            fresh = self.state.pool.add(experiences)
            self.state.sampler.add(len(experiences))
        choice = self.parts.maker.choose(cursor.round, fresh)
        order = self._epoch_order(cursor.round, 0, len(choice.indices))
        self.state.batch, self.round_metrics = self.parts.maker.make(choice, order, self.state.kl.kl_coef)
        clipped = self.parts.maker.clipped(fresh, choice.indices)
        self.round_metrics["reward_clip_frac"] = clipped.value
        self.round_samples = {"reward_clip_frac": clipped.answers}
        self.context.recorder.event("round", round=cursor.round, answers=len(choice.indices), **self.round_metrics)

    def _plan(self, round_index: int, answers: int) -> list[list[int]]:
        """Minibatches of all epochs of a round."""
        epochs = [self._epoch_order(round_index, epoch, answers) for epoch in range(self.ppo.ppo_epochs)]
        return [rows for order in epochs for rows in minibatch_rows(order, self.ppo.ppo_mini_batch_size)]

    def _epoch_order(self, round_index: int, epoch: int, answers: int) -> list[int]:
        generator = torch_generator(self.context.spec.seed, f"ppo/order/round={round_index}/epoch={epoch}")
        return [int(i) for i in torch.randperm(answers, generator=generator)]

    def _settings(self) -> UpdateSettings:
        cursor = self.state.cursor
        return UpdateSettings(
            cursor.clip_ratio_low, cursor.clip_ratio_high,
            train_policy=cursor.round >= self.ppo.critic_warmup_rounds,
            first_of_round=cursor.round if cursor.step_in_round == 0 else None,
        )  # fmt: skip

    def _after_step(self, metrics: dict[str, float]) -> None:
        cursor = self.state.cursor
        cursor.step_in_round += 1
        cursor.step += 1
        cursor.applied += int(metrics["applied"] and "ratio_mean" in metrics)
        if self.ppo.ema_decay is not None and metrics["applied"]:
            update_ema(self.state.ema, self.state.policy, self.ppo.ema_decay)
        if not metrics["applied"]:
            self.context.recorder.event("step_not_applied", step=cursor.step, reason="loss or gradient not finite")
        cursor.round_over = self._moved_too_far(metrics)  # before the checkpoint: a resumed run must stop here, too
        metrics |= {"kl_coef": self.state.kl.kl_coef} | self._due_looks()
        of_the_round = metrics | self.round_metrics
        self.context.recorder.record(cursor.step, of_the_round)
        self._show(of_the_round)
        # What is true of the whole round is judged once, at its first step, or every warning would come many times.
        judged = of_the_round if cursor.step_in_round == 1 else metrics
        self.reactions.act(self.parts.guards.observe(cursor.step, judged, self.round_samples, within_round=True))
        if cursor.step % self.replay.refresh_steps == 0 and self.state.batch is not None:
            self.parts.maker.refresh(self.state.batch)
        if cursor.step % self.checkpoint_every == 0:
            self._save(self.parts.checkpoints)

    def _due_looks(self) -> dict[str, float]:
        """None at a round's last step: the look that follows the round would show the guards one policy twice."""
        cursor, batch = self.state.cursor, self.state.batch
        assert batch is not None
        minibatches = -(-len(batch.indices) // self.ppo.ppo_mini_batch_size)
        if cursor.round_over or cursor.step_in_round == self.ppo.ppo_epochs * minibatches:
            return self.onlooker.texts_due(cursor.step) if cursor.round + 1 < self.ppo.rounds else {}
        return self.onlooker.within_round(cursor.step)

    def _moved_too_far(self, metrics: dict[str, float]) -> bool:
        limit = self.ppo.max_approx_kl
        if limit is None or not metrics.get("approx_kl", 0.0) > limit:
            return False
        cursor = self.state.cursor
        self.context.recorder.event(
            "early_stop", round=cursor.round, step=cursor.step, approx_kl=metrics["approx_kl"], limit=limit
        )
        return True

    def _show(self, metrics: dict[str, float]) -> None:
        cursor = self.state.cursor
        minibatches = -(-self.ppo.train_batch_size // self.ppo.ppo_mini_batch_size)
        a_round = self.ppo.ppo_epochs * minibatches
        shown = {
            key: metrics[key] for key in ("reward_mean", "heldout_reward", "kl_ref", "approx_kl") if key in metrics
        }
        self.context.recorder.progress(
            min(cursor.round * a_round + cursor.step_in_round, self.ppo.rounds * a_round),
            self.ppo.rounds * a_round,
            **shown,
        )

    # -- between rounds --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Baselines before the first step, and the first good state: the policy as it came."""
        self.context.recorder.rewind(0)
        self._tell_refused()
        self.state.sampler.add(self.state.pool.num_stored)
        probe, found = self.onlooker.before()
        clipped = self._clipped_before(probe)
        metrics = found | {"reward_clip_frac": clipped.value}
        within = self.onlooker.before_within(probe)
        self.parts.guards.set_baseline(metrics, {"reward_clip_frac": clipped.answers}, within)
        self.context.recorder.record(0, metrics)
        self._keep_if_best(selection_score(probe, self.ppo), metrics)
        self._save_good()

    def _clipped_before(self, probe: Probe) -> Share:
        """What the clip takes of the incoming policy's answers, judged now. Stored ones are held against it as well:
        damaged ones would be their own excuse. A function has no scale for both, so there the store counts as it is."""
        maker = self.parts.maker
        found = Share(clipped_share(probe.scores, self.ppo, maker.scale), len(probe.scores))
        if isinstance(self.parts.prober.scorer, FunctionScorer) and maker.pool.num_stored:
            return max(found, maker.clipped_stored())
        return found

    def _end_round(self) -> None:
        cursor = self.state.cursor
        trained = cursor.round >= self.ppo.critic_warmup_rounds
        cursor.next_round()
        self.state.batch = None
        if trained:
            seen = self.onlooker.after_round(is_last=cursor.round == self.ppo.rounds)
        else:
            seen = self.onlooker.after_warmup(self.parts.guards.baseline)
        self.context.recorder.record(cursor.step, seen.recorded)
        self.reactions.act(self.parts.guards.observe(cursor.step, seen.current), round_is_over=True)
        self._control_kl(seen.current["kl_ref"], trained)
        if trained:
            with self.onlooker.averaged():
                self._keep_if_best(seen.handed_on[SCORE], seen.handed_on)
        self._save_good()

    def _control_kl(self, kl_ref: float, trained: bool) -> None:
        """Once a round. While the critic learns alone nothing pulls at the policy: that it came far may raise the price
        of drift, that it is near says nothing of how tightly it is held."""
        if math.isfinite(kl_ref) and (trained or kl_ref > self.ppo.kl_ctrl.target_kl):
            self.state.kl.update(kl_ref, self.ppo.train_batch_size)

    def _keep_if_best(self, score: float, metrics: dict[str, float]) -> None:
        if not self.ppo.select_best or (math.isfinite(score) and score > self.state.best.score):
            best = self.state.best
            best.score, best.round, best.probe = score, self.state.cursor.round, dict(metrics)
            best.tensors = self.state.policy.tensors()
            self.context.recorder.event("best_round", round=best.round, score=score)

    def _finish(self) -> None:
        if self.state.cursor.applied == 0:
            raise StageError(
                "ppo: no optimiser step of the policy was applied: each was not finite, or was rolled back",
                "look at the events in metrics.jsonl; lower ppo.actor_lr, or look at the data",
            )
        if self.state.best.tensors:
            self.state.policy.load_tensors(self.state.best.tensors)

    def _skip_round(self) -> None:
        """The round whose data led here is not tried again: going on means new data."""
        self.state.cursor.next_round()
        self.state.batch = None
        self._save_good()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _save_good(self) -> None:
        self.state.cursor.good_step = self.state.cursor.step
        self._save(self.parts.good)
        self._save(self.parts.checkpoints)

    def _save(self, folder: CheckpointFolder) -> None:
        """The main rank writes; where weights are spread the others give their parts."""
        world = self.parts.updater.world
        if not (world.is_main or world.in_step):
            return
        extra = {
            "key": self.context.spec.key, "seed": self.context.spec.seed, "guards": self.parts.guards.state_dict(),
            "round_metrics": self.round_metrics, "metrics_position": self.context.recorder.position(),
        }  # fmt: skip
        tensors = self.state.tensors()
        if world.is_main:
            folder.save(self.state.cursor.step, tensors, self.state.state() | extra)

    def _resume(self) -> bool:
        checkpoint = self.parts.checkpoints.latest()
        if checkpoint is None or checkpoint.state["key"] != self.context.spec.key:
            return False
        self.state.load(checkpoint)
        self.parts.guards.load_state_dict(checkpoint.state["guards"])
        self.round_metrics = dict(checkpoint.state["round_metrics"])
        self.context.recorder.rewind(checkpoint.state["metrics_position"])
        self._tell_refused()
        return True

    def _tell_refused(self) -> None:
        for refused in self.parts.checkpoints.refused:
            self.context.recorder.event("checkpoint_refused", reason=refused)

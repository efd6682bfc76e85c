"""Stage ppo: build the parts, run the rounds, write the policy, keep tonight's answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from configs.schema.guards import GuardsConfig
from configs.schema.metric_names import BASELINE_METRICS, STEP_METRICS
from configs.schema.models import ModelsConfig
from configs.schema.ppo import PPOConfig, ReplayConfig, RolloutConfig
from configs.schema.supervised import RewardConfig
from training.annotate import annotation_digests, open_store
from training.checkpoint import CheckpointFolder
from training.context import StageContext, StageOutcome
from training.contract import GOOD_STATES, read_json
from training.examples import encode_imitation, encode_prompts, read_split
from training.guards import GuardMonitor
from training.models.sampling import SamplingSettings
from training.objectives import AdaptiveKLController, FixedKLController
from training.ppo.actors import Actors, build_actors, build_engines, save_policy
from training.ppo.experience import Experience, ExperiencePool
from training.ppo.loop import Parts, PPOLoop
from training.ppo.probe import Prober
from training.ppo.rollout import RolloutWorker
from training.ppo.rounds import RoundMaker
from training.ppo.shaping import RewardScale
from training.ppo.state import Best, Cursor, KLController, PPOState
from training.ppo.update import Updater
from training.replay.prioritized import PrioritizedSampler
from training.replay.trajectory import SamplingSettings as StoredSampling
from training.replay.trajectory import Trajectory
from training.replay.view import StoreView
from training.scoring import Scorer, build_scorer
from training.seeding import named_seed
from training.world import World, current_world


def run(context: StageContext) -> StageOutcome:
    """Train the policy and write it; the night's fresh answers go into the store."""
    models, ppo = context.section("models", ModelsConfig), context.section("ppo", PPOConfig)
    world = current_world()
    actors = build_actors(context, models, ppo, world)
    reward = context.section("reward", RewardConfig)
    tokenizer = actors.policy.backbone.tokenizer
    scorer = build_scorer(reward, models, context.spec.inputs.get("reward_model"), tokenizer)
    with open_store(context, actors.policy.backbone, writable=False) as store:
        view = store.view_from_manifest(read_json(context.input("view")))
    parts = _build_parts(context, actors, scorer, view, models, ppo, world)
    guards, replay = context.section("guards", GuardsConfig), context.section("replay", ReplayConfig)
    loop = PPOLoop(parts, ppo, replay, guards, context, ppo.checkpoint_every)
    loop.run()
    outputs = save_policy(actors, context, parts.prober.prompts[0], write=world.is_main)
    if not world.is_main:
        return StageOutcome()
    _keep_fresh(context, actors, scorer, parts.state.pool.fresh)
    return StageOutcome(outputs, _metrics(parts), _facts(parts, view))


def _build_parts(
    context: StageContext, actors: Actors, scorer: Scorer, view: StoreView, models: ModelsConfig, ppo: PPOConfig,
    world: World,
) -> Parts:  # fmt: skip
    replay, rollout = context.section("replay", ReplayConfig), context.section("rollout", RolloutConfig)
    guards, seed = context.section("guards", GuardsConfig), context.spec.seed
    actor, critic_engine = build_engines(actors, ppo, world)
    pool = ExperiencePool(view)
    sampler = _sampler(len(view), ppo, replay, rollout, seed)
    cursor = Cursor(clip_ratio_low=ppo.clip_ratio, clip_ratio_high=ppo.clip_ratio_upper)
    ema = actors.policy.tensors() if ppo.ema_decay is not None else {}
    state = PPOState(
        actors.policy, actors.critic, actor, critic_engine, sampler, _kl_controller(ppo), pool, cursor, Best(), ema
    )
    # Answers are drawn one by one, so that there is no prompt to share: packed is the one way to save tokens here.
    layout = "packed" if models.layout == "packed" else "padded"
    updater = Updater(actors, actor, critic_engine, ppo, world, layout)
    scale = RewardScale(scorer.mean, scorer.std, models.max_response_length)
    rows = read_split(context.input("snapshot"), "validation") or read_split(context.input("snapshot"), "train")
    prompts = encode_prompts(rows, actors.encoder, max(ppo.selection_prompts, guards.kl_probe_prompts))
    held_out = encode_imitation(rows, actors.encoder)[1][: guards.perplexity_rows]
    answering = SamplingSettings(models.max_response_length, batch_size=rollout.batch_size)
    return Parts(
        state=state,
        updater=updater,
        maker=RoundMaker(pool, sampler, updater, ppo, replay, scale, seed),
        rollouts=_rollouts(context, actors, scorer, models, ppo, rollout, world),
        prober=Prober(actors, scorer, prompts, answering, held_out, ppo.ppo_max_token_len, seed, world),
        guards=GuardMonitor(guards.rules, *_measured(bool(held_out))),
        checkpoints=CheckpointFolder(context.checkpoints),
        good=CheckpointFolder(context.directory / GOOD_STATES, keep=2),
    )


def _measured(has_texts: bool) -> tuple[list[str], list[str]]:
    """Metrics that this run measures, and those with a baseline. Without texts to read there is no perplexity, and a
    rule on it would pass in silence."""
    step, baseline = (
        [name for name in names if has_texts or name != "perplexity"] for names in (STEP_METRICS, BASELINE_METRICS)
    )
    return step, baseline


def _sampler(
    stored: int, ppo: PPOConfig, replay: ReplayConfig, rollout: RolloutConfig, seed: int
) -> PrioritizedSampler:
    fresh = ppo.rounds * rollout.n * rollout.prompts_per_round
    return PrioritizedSampler(
        max(1, stored + fresh), alpha=replay.alpha, beta_start=replay.beta_start, beta_end=replay.beta_end,
        beta_steps=max(1, ppo.rounds - 1), eps=replay.eps, seed=named_seed(seed, "ppo/sampler"),
    )  # fmt: skip


def _kl_controller(ppo: PPOConfig) -> KLController:
    control = ppo.kl_ctrl
    if control.type == "fixed":
        return FixedKLController(control.kl_coef)
    return AdaptiveKLController(control.kl_coef, control.target_kl, control.horizon)


def _rollouts(
    context: StageContext, actors: Actors, scorer: Scorer, models: ModelsConfig, ppo: PPOConfig, rollout: RolloutConfig,
    world: World,
) -> RolloutWorker | None:  # fmt: skip
    if rollout.n == 0:
        return None
    prompts = encode_prompts(read_split(context.input("snapshot"), "train"), actors.encoder)
    return RolloutWorker(
        actors, scorer, prompts, rollout, models.max_response_length, ppo.ppo_max_token_len, context.spec.seed, world
    )


def _keep_fresh(context: StageContext, actors: Actors, scorer: Scorer, fresh: list[Experience]) -> None:
    """Append tonight's answers, annotated; a repeat of the stage finds them there already and adds nothing."""
    if not fresh:
        return
    rollout = context.section("rollout", RolloutConfig)
    digests = annotation_digests(context.spec.inputs["reference"], scorer)
    assert digests.ref_log_probs is not None
    assert digests.score is not None
    with open_store(context, actors.policy.backbone, writable=True) as store:
        night = store.begin_night(context.spec.night)
        ids = store.append([_stored(e, context, rollout, night) for e in fresh])
        known = dict(zip(ids, fresh, strict=True))
        store.annotate(digests.ref_log_probs, "ref_log_probs", {name: e.ref_log_probs for name, e in known.items()})
        store.annotate(digests.score, "score", {name: np.float32(e.score) for name, e in known.items()})


def _stored(e: Experience, context: StageContext, rollout: RolloutConfig, night: int) -> Trajectory:
    return Trajectory(
        prompt_id=e.prompt_id,
        prompt_ids=np.asarray(e.prompt_ids, dtype=np.int32),
        response_ids=np.asarray(e.response_ids, dtype=np.int32),
        policy_version=f"{context.spec.key[:16]}/round={e.round}",
        created_night=night,
        eos=e.finished,
        behavior_log_probs=e.behavior_log_probs,
        sampling=StoredSampling(rollout.temperature, rollout.top_p, rollout.top_k),
        source="policy",
    )


def _metrics(parts: Parts) -> dict[str, float]:
    best, cursor = parts.state.best, parts.state.cursor
    kept = {key: value for key, value in best.probe.items() if math.isfinite(value)}
    return kept | {
        "steps": float(cursor.step), "steps_applied": float(cursor.applied), "best_round": float(best.round),
        "rollbacks": float(sum(parts.guards.rollbacks)), "guard_firings": float(len(parts.guards.fired)),
    }  # fmt: skip


def _facts(parts: Parts, view: StoreView) -> dict[str, Any]:
    return {
        "guards": parts.guards.fired, "estimated_share": view.estimated_share, "stored": len(view),
        "fresh": len(parts.state.pool.fresh), "baseline": parts.guards.baseline,
    }  # fmt: skip

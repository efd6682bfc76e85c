"""Stage annotate: once per stored answer, in one batched pass, what frozen models say about it.

Reference log-probs (they also stand in for behaviour log-probs where none were recorded) and the reward. Cached in the
trajectory store by the digest of the model that said it, so a second night pays for new rows only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from configs.schema.models import ModelsConfig
from configs.schema.ppo import ReplayConfig
from configs.schema.supervised import RewardConfig
from training.context import StageContext, StageOutcome
from training.contract import FileRef
from training.errors import StageError
from training.examples import Answer, Encoder, Prompt, encode_answers, read_split
from training.models.backbone import Backbone
from training.models.batching import microbatches
from training.models.layout import Group, build_layout, group_sizes
from training.models.network import Network
from training.models.tokenize import pad_id
from training.recorder import Told, above, untold
from training.replay.annotation import AnnotationDigests
from training.replay.store import TrajectoryStore
from training.replay.trajectory import Trajectory
from training.runtime import pick_device, pick_dtype
from training.scoring import Question, Scorer, build_scorer

CHUNK = 512


def run(context: StageContext) -> StageOutcome:
    """Add the night's stored answers, annotate what is not annotated yet, and fix the view that PPO trains on."""
    models, reward = context.section("models", ModelsConfig), context.section("reward", RewardConfig)
    replay = context.section("replay", ReplayConfig)
    device = pick_device()
    backbone = Backbone.load(context.input("reference"), device=device, dtype=pick_dtype(models.dtype, device))
    encoder = Encoder(backbone.tokenizer, models)
    answers = encode_answers(read_split(context.input("snapshot"), "train"), encoder)
    scorer = build_scorer(reward, models, context.spec.inputs.get("reward_model"), backbone.tokenizer)
    digests = annotation_digests(context.spec.inputs["reference"], scorer)
    view_file = context.output("view.json")
    with open_store(context, backbone, writable=True) as store:
        night = store.begin_night(context.spec.night)
        # Stale rows go first: one that tonight's data still holds is stored anew, as tonight's.
        store.evict(max_age_nights=replay.max_age_nights, current_night=night)
        own = store.append([_trajectory(answer, night) for answer in answers])
        store.evict(capacity=replay.capacity)
        prompts = {answer.prompt.prompt_id: answer.prompt for answer in answers}
        mine = set(own)
        kept = [name for name in store.ids if name in mine] + _fresh_of_known_prompts(store, prompts)
        if not kept:
            raise StageError("annotate: no stored answer is left to train on", "raise replay.capacity")
        hits = len(kept) - _annotate(store, kept, Network(backbone), scorer, digests, prompts, context, reward)
        view = store.view(kept, digests)
        view.require_annotated()
        view.write_manifest(view_file)
        facts = {"trajectories": len(view), "cache_hits": hits, "stored": len(store), "reward": scorer.name}
        metrics = {"trajectories": float(len(view)), "estimated_share": view.estimated_share}
        metrics |= {"score_mean": float(view.scores.mean()), "score_std": float(view.scores.std())}
    return StageOutcome({"view": view_file}, metrics, facts)


def open_store(context: StageContext, backbone: Backbone, *, writable: bool) -> TrajectoryStore:
    """The home's trajectory store for this tokenizer."""
    return TrajectoryStore.open(
        Path(context.spec.params["store"]), writable=writable, tokenizer_digest=tokenizer_digest(backbone)
    )


def tokenizer_digest(backbone: Backbone) -> str:
    """sha256 of the vocabulary: stored ids mean nothing under another one."""
    vocabulary = sorted(backbone.tokenizer.get_vocab().items())
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()


def annotation_digests(reference: FileRef, scorer: Scorer) -> AnnotationDigests:
    """Whose annotations this night reads. Behaviour estimates come from the reference."""
    return AnnotationDigests(reference.sha256, reference.sha256, scorer.digest)


def _trajectory(answer: Answer, night: int) -> Trajectory:
    return Trajectory(
        prompt_id=answer.prompt.prompt_id,
        prompt_ids=np.asarray(answer.prompt.token_ids, dtype=np.int32),
        response_ids=np.asarray(answer.response.token_ids, dtype=np.int32),
        policy_version=f"data:{answer.writer}",
        created_night=night,
        eos=answer.response.finished,
        score=answer.reward,
        reward_source="recorded" if answer.reward is not None else None,
        source=answer.prompt.source,
    )


def _fresh_of_known_prompts(store: TrajectoryStore, prompts: dict[str, Prompt]) -> list[str]:
    """Answers that earlier nights' policies sampled to prompts that are still training prompts."""
    view = store.view()
    sampled = ~view.estimated
    return [
        name
        for name, prompt_id, fresh in zip(view.ids, view.prompt_id, sampled.tolist(), strict=True)
        if fresh and prompt_id in prompts
    ]


def _annotate(
    store: TrajectoryStore, ids: Sequence[str], reference: Network, scorer: Scorer, digests: AnnotationDigests,
    prompts: dict[str, Prompt], context: StageContext, reward: RewardConfig,
) -> int:  # fmt: skip
    """Fill what is missing, a chunk at a time, each chunk durable; returns how many trajectories needed anything."""
    assert digests.ref_log_probs is not None
    assert digests.score is not None
    unread = set(store.missing(digests.ref_log_probs, "ref_log_probs", ids))
    unread |= set(store.missing(digests.ref_log_probs, "behavior_log_probs", ids))
    unscored = set(store.missing(digests.score, "score", ids))
    todo = [name for name in ids if name in unread or name in unscored]
    judging, reading = (context.recorder.counting(doing, len(todo)) for doing in ("reward judges", "reference reads"))
    for start in range(0, len(todo), CHUNK):
        chunk = todo[start : start + CHUNK]
        batch = store.view(chunk).batch(np.arange(len(chunk)))
        groups = [Group(p.tolist(), (r.tolist(),)) for p, r in zip(batch.prompt_ids, batch.response_ids, strict=True)]
        to_read = [i for i, name in enumerate(chunk) if name in unread]
        read = above(reading, start)
        found = response_log_probs(reference, [groups[i] for i in to_read], reward.max_tokens_per_microbatch, read)
        log_probs = {chunk[i]: values for i, values in zip(to_read, found, strict=True)}
        store.annotate(digests.ref_log_probs, "ref_log_probs", log_probs)
        estimates = store.missing(digests.ref_log_probs, "behavior_log_probs", list(log_probs))
        store.annotate(digests.ref_log_probs, "behavior_log_probs", {name: log_probs[name] for name in estimates})
        to_judge = [i for i, name in enumerate(chunk) if name in unscored]
        questions = [Question(prompts[batch.prompt_id[i]], tuple(batch.response_ids[i].tolist())) for i in to_judge]
        scores = scorer.scores(questions, above(judging, start))
        store.annotate(digests.score, "score", {chunk[i]: score for i, score in zip(to_judge, scores, strict=True)})
        context.recorder.progress(start + len(chunk), len(todo))
    return len(todo)


@torch.no_grad()
def response_log_probs(
    network: Network, groups: Sequence[Group], budget: int, told: Told = untold
) -> list[NDArray[np.float32]]:
    """Log-probs of each group's one response, [R] each, in order. `told` counts groups."""
    found: list[NDArray[np.float32]] = [np.zeros(0, dtype=np.float32)] * len(groups)
    done = 0
    for batch in microbatches(group_sizes(groups, "padded"), budget):
        layout = build_layout([groups[i] for i in batch], "padded", pad_id(network.backbone.tokenizer))
        values = network.log_probs(layout.to(network.backbone.device)).float().cpu().numpy()
        for i, row in zip(batch, values, strict=True):
            found[i] = row[: len(groups[i].responses[0])].copy()
        done += len(batch)
        told(done)
    return found

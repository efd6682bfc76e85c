"""Which answers make a round, and what the old policy and critic say of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from configs.schema.ppo import PPOConfig, ReplayConfig
from tests.training.ppo.conftest import BuildLoop
from tests.training.stages import PPO, REPLAY, ROLLOUT
from training.errors import DataError, StageError
from training.ppo.rounds import RoundMaker, minibatch_rows
from training.ppo.shaping import RewardScale
from training.replay.prioritized import PrioritizedSampler

FILTERS = ("none", "best_random", "best_worst", "power")


def maker(
    stored: list[list[float]], fresh: list[list[float]] = (), batch: int = 8, seed: int = 3, **replay: Any
) -> tuple[RoundMaker, np.ndarray]:
    """A maker over scores by prompt: stored ones first, then tonight's; and the indices of tonight's."""
    scores = [s for group in (*stored, *fresh) for s in group]
    groups = [f"p{i}/-1" for i, g in enumerate(stored) for _ in g] + [f"p{i}/0" for i, g in enumerate(fresh) for _ in g]
    num_stored = sum(map(len, stored))
    pool = SimpleNamespace(
        scores=lambda: np.asarray(scores, dtype=np.float32), filter_groups=lambda: groups, num_stored=num_stored
    )
    sampler = PrioritizedSampler(len(scores) + 5, beta_steps=4, eps=1e-3, seed=1)
    sampler.add(len(scores))
    ppo = PPOConfig(train_batch_size=batch, ppo_mini_batch_size=1)
    found = RoundMaker(pool, sampler, None, ppo, ReplayConfig(**replay), RewardScale(0, 1, 9), seed)
    return found, np.arange(num_stored, len(scores))


def spread(prompts: int, answers: int, seed: int = 0) -> list[list[float]]:
    return np.random.default_rng(seed).normal(size=(prompts, answers)).tolist()


def allowed(group: list[float], kind: str) -> set[int]:
    """Places within a group that a filter may keep."""
    order = sorted(range(len(group)), key=lambda i: group[i])
    return set(range(len(group))) if kind != "best_worst" else {order[0], order[-1]}


@pytest.mark.parametrize("kind", FILTERS)
def test_fresh_answers_take_their_share_and_the_store_fills_the_rest(kind: str):
    stored, fresh = spread(20, 4, 1), spread(6, 5, 2)
    found, tonight = maker(stored, fresh, batch=16, filter=kind, stored_share=0.5)
    choice = found.choose(0, tonight)
    assert len(choice.indices) == len(choice.weights) == 16
    new = [i for i in choice.indices if i >= 80]
    assert len(new) == 8
    assert len(set(new)) == 8, "a fresh answer came twice"
    assert (choice.weights[:8] == 1).all()
    assert choice.weights.max() == 1
    assert (choice.weights > 0).all()
    for i in choice.indices:
        groups, place = (stored, i) if i < 80 else (fresh, i - 80)
        width = len(groups[0])
        assert place % width in allowed(groups[place // width], kind)


def test_the_filters_best_is_always_there():
    """best_random keeps the best of each prompt and one other; best_worst its ends."""
    fresh = spread(4, 5, 2)
    for kind, kept in (("best_random", 8), ("best_worst", 8), ("none", 20), ("power", 20)):
        found, tonight = maker([], fresh, batch=20, filter=kind)
        chosen = set(found.choose(0, tonight).indices)
        assert len(chosen) == kept
        assert {5 * p + int(np.argmax(group)) for p, group in enumerate(fresh)} <= chosen


def test_the_random_other_is_drawn_anew_each_round():
    found, tonight = maker([], spread(6, 5), batch=30, filter="best_random")
    rounds = [frozenset(found.choose(r, tonight).indices) for r in range(4)]
    assert len(set(rounds)) == 4
    assert frozenset(found.choose(2, tonight).indices) == rounds[2]


def test_few_fresh_answers_all_come():
    found, tonight = maker(spread(10, 2), spread(1, 2), batch=8, filter="none")
    indices = found.choose(0, tonight).indices
    assert indices[:2] == [20, 21]
    assert len(indices) == 8


def test_without_fresh_answers_all_come_from_the_store():
    found, _ = maker(spread(10, 2), batch=8)
    choice = found.choose(0, np.zeros(0, dtype=np.int64))
    assert len(choice.indices) == 8
    assert set(choice.indices) <= set(range(20))


def test_without_a_store_fresh_answers_fill_the_round():
    found, tonight = maker([], spread(10, 4), batch=16, filter="none", stored_share=0.9)
    choice = found.choose(0, tonight)
    assert len(set(choice.indices)) == 16
    assert torch.equal(choice.weights, torch.ones(16))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_extremes_of_the_stored_share(share: float):
    found, tonight = maker(spread(10, 2), spread(5, 4), batch=8, filter="none", stored_share=share)
    fresh = sum(i >= 20 for i in found.choose(0, tonight).indices)
    assert fresh == (8 if share == 0.0 else 1)


def test_older_fresh_answers_are_as_good_as_stored_ones():
    found, tonight = maker(spread(1, 2), spread(8, 2), batch=12, filter="none")
    last = tonight[-4:]
    indices = found.choose(1, last).indices
    assert set(indices[:4]) == set(last.tolist())
    assert not set(indices[4:]) & set(last.tolist()), "this round's answers are in already"
    assert any(2 <= i < 14 for i in indices[4:])


@pytest.mark.parametrize("prioritized", [True, False])
def test_the_choice_follows_the_seed_and_the_round(prioritized: bool):
    stored, fresh = spread(10, 3), spread(6, 5)

    def choose(seed: int = 3, rounds: int = 0) -> list[int]:
        found, tonight = maker(stored, fresh, batch=12, seed=seed, prioritized=prioritized, filter="best_random")
        return found.choose(rounds, tonight).indices

    assert choose() == choose()
    assert choose() != choose(seed=4)
    assert choose() != choose(rounds=1)


@pytest.mark.parametrize("prioritized", [True, False])
def test_frequencies_are_filter_times_priority(prioritized: bool):
    found, _ = maker(spread(4, 3), batch=6_000, filter="power", filter_power=2.0, prioritized=prioritized)
    errors = np.linspace(0.1, 2.0, 12)
    found.sampler.update(np.arange(12), errors)
    scores = found.pool.scores().reshape(4, 3)
    mass = ((scores - scores.mean(axis=1, keepdims=True)) ** 2).reshape(-1).astype(np.float64)
    if prioritized:
        mass = mass * (errors + 1e-3) ** 0.6
    seen = Counter(found.choose(0, np.zeros(0, dtype=np.int64)).indices)
    expected = mass / mass.sum() * 6_000
    keep = expected >= 5
    observed = np.asarray([seen[i] for i in range(12)])
    scaled = expected[keep] * observed[keep].sum() / expected[keep].sum()
    assert stats.chisquare(observed[keep], scaled).pvalue > 1e-4


def test_priority_weights_undo_the_priorities():
    found, _ = maker(spread(4, 3), batch=500, filter="none", beta_start=1.0)
    found.sampler.beta_start = 1.0
    errors = np.linspace(0.1, 2.0, 12)
    found.sampler.update(np.arange(12), errors)
    choice = found.choose(0, np.zeros(0, dtype=np.int64))
    mass = (errors[choice.indices] + 1e-3) ** 0.6
    np.testing.assert_allclose(choice.weights.numpy(), mass.min() / mass, rtol=1e-5)


def test_a_filter_that_leaves_nothing_is_an_error():
    """`power` gives equal answers no weight."""
    found, tonight = maker([[1.0, 1.0]], [[2.0, 2.0]], filter="power")
    with pytest.raises(StageError, match=r"the filter leaves no answer(.|\n)*another replay.filter"):
        found.choose(0, tonight)


def test_a_score_that_is_not_finite_is_an_error():
    found, tonight = maker([[1.0, math.nan]])
    with pytest.raises(DataError, match="cannot be ranked"):
        found.choose(0, tonight)


def test_minibatches_are_consecutive_rows():
    assert minibatch_rows([3, 1, 2, 0, 4], 2) == [[3, 1], [2, 0], [4]]


MakeRound = Callable[..., Any]


@pytest.fixture
def opened(build_loop: BuildLoop) -> MakeRound:
    """A loop whose first round is open."""

    def make(**sections: Any) -> Any:
        loop = build_loop(**sections)
        loop.state.sampler.add(loop.state.pool.num_stored)
        loop._open_round()
        return loop

    return make


def test_the_old_pass_is_what_the_first_minibatch_will_see(opened: MakeRound):
    """Not close: the same bits, or the first ratio is not 1."""
    for budget in (8192, 300):
        loop = opened(ppo=PPO.model_copy(update={"ppo_max_token_len": budget}))
        batch, updater = loop.state.batch, loop.parts.updater
        experiences = loop.state.pool.take(batch.indices.tolist())
        for rows in loop._plan(0, len(experiences))[:2]:
            minibatch = updater.minibatch(rows, experiences)
            for piece in updater.microbatches(minibatch):
                layout = updater.layout([minibatch.experiences[i] for i in piece])
                width = layout.response_mask.shape[1]
                chosen = torch.tensor([rows[i] for i in piece])
                now = loop.parts.updater.actors.policy.log_probs(layout).detach()
                assert torch.equal(now, batch.old_log_probs[chosen, :width])
                values = loop.parts.updater.actors.critic.values(layout).detach()
                assert torch.equal(values, batch.old_values[chosen, :width])


def test_the_rounds_tensors_belong_together(opened: MakeRound):
    loop = opened()
    batch, pool = loop.state.batch, loop.state.pool
    experiences = pool.take(batch.indices.tolist())
    assert batch.response_mask.sum(dim=1).tolist() == [len(e.response_ids) for e in experiences]
    for i, e in enumerate(experiences):
        length = len(e.response_ids)
        assert batch.behavior_log_probs[i, :length].numpy().tobytes() == e.behavior_log_probs.tobytes()
        assert batch.ref_log_probs[i, :length].numpy().tobytes() == e.ref_log_probs.tobytes()
    for name in ("old_log_probs", "old_values", "rewards", "advantages", "returns", "weights", "behavior_log_probs"):
        assert not getattr(batch, name)[~batch.response_mask].any(), name
        assert torch.isfinite(getattr(batch, name)).all(), name
    # the policy is still the reference: its log-probs are the annotated ones
    torch.testing.assert_close(batch.old_log_probs, batch.ref_log_probs, atol=1e-4, rtol=0)
    assert loop.round_metrics["reward_mean"] == pytest.approx(float(batch.shaped_scores.mean()))
    assert loop.round_metrics["fresh_share"] == pytest.approx(sum(e.round >= 0 for e in experiences) / len(experiences))
    assert loop.round_metrics["kl_behavior"] == pytest.approx(0.0, abs=1e-4)
    assert loop.round_metrics["kl_behavior_estimated"] == pytest.approx(0.0, abs=1e-4)
    assert 0 < loop.round_metrics["effective_sample_fraction"] <= 1


def stale(loop: Any, shift: float, recorded: bool) -> Any:
    """Answers of one kind as if someone else had written them: every other token likelier to that one, or rarer."""
    take = loop.state.pool.take

    def taken(indices: Any) -> Any:
        found = []
        for e in take(indices):
            moved = e.behavior_log_probs + np.resize([shift, -shift], len(e.behavior_log_probs)).astype(np.float32)
            found.append(replace(e, behavior_log_probs=moved) if e.recorded == recorded else e)
        return found

    loop.state.pool.take = taken
    return loop


@pytest.mark.parametrize("recorded", [True, False])
def test_kl_behavior_is_never_negative_and_keeps_estimated_writers_apart(build_loop: BuildLoop, recorded: bool):
    """k3 with r = old / writer, by hand in float64; tokens that the policy finds rarer do not cancel those it likes."""
    loop = stale(build_loop(), 0.5, recorded)
    loop.state.sampler.add(loop.state.pool.num_stored)
    loop._open_round()
    batch, metrics = loop.state.batch, loop.round_metrics
    experiences = loop.state.pool.take(batch.indices.tolist())
    assert {e.recorded for e in experiences} == {True, False}, "both kinds are in the round"
    for kind, name in ((True, "kl_behavior"), (False, "kl_behavior_estimated")):
        mask = batch.response_mask & torch.tensor([e.recorded == kind for e in experiences])[:, None]
        log_r = (batch.old_log_probs - batch.behavior_log_probs)[mask].double().numpy()
        assert metrics[name] == pytest.approx(float(np.mean(np.exp(log_r) - 1 - log_r)), rel=1e-4, abs=1e-7)
        assert (metrics[name] > 0.1) == (kind == recorded)


def test_kl_behavior_of_stored_answers_alone(build_loop: BuildLoop):
    """Nobody recorded their log-probs, so there is nothing to be told of a writer: no number, not a good one."""
    loop = build_loop(rollout=ROLLOUT.model_copy(update={"n": 0}))
    loop.state.sampler.add(loop.state.pool.num_stored)
    loop._open_round()
    assert "kl_behavior" not in loop.round_metrics
    assert loop.round_metrics["kl_behavior_estimated"] >= 0


def test_importance_weights_are_old_policy_over_writer(opened: MakeRound):
    loop = opened(replay=REPLAY.model_copy(update={"importance_level": "token", "prioritized": False}))
    maker_, mask = loop.parts.maker, torch.tensor([[True, True, True, False]])
    ratios = torch.tensor([[0.5, 1.4, 3.0, 9.0]])
    assert maker_._weights(ratios.log(), mask).tolist() == [pytest.approx([0.5, 1.4, 1.2, 0.0])]
    plain = opened(replay=REPLAY.model_copy(update={"importance_weights": False})).parts.maker
    assert plain._weights(ratios.log(), mask).tolist() == [[1, 1, 1, 0]]


def test_priorities_are_the_rounds_td_errors(opened: MakeRound):
    loop = opened()
    batch, sampler = loop.state.batch, loop.state.sampler
    with torch.no_grad():
        loop.parts.updater.actors.critic.head.bias.fill_(3.0)
    before = sampler.priorities()
    loop.state.policy.log_probs = None  # the critic alone is asked
    loop.parts.maker.refresh(batch)
    after = sampler.priorities()
    seen = set(batch.indices.tolist())
    for i in range(len(before)):
        assert (before[i] != after[i]) == (i in seen)
    i = int(batch.indices[0])
    length = int(batch.response_mask[0].sum())
    last = [row for row, index in enumerate(batch.indices.tolist()) if index == i][-1]
    rewards = batch.rewards[last, :length].double()
    delta = rewards + torch.tensor([0.0] * (length - 1) + [-3.0])
    assert after[i] == pytest.approx(float(delta.abs().mean()) + REPLAY.eps, rel=1e-4)

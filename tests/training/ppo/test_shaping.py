"""From scores to advantages, against oracles in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.ppo import PPOConfig
from tests.training.ppo.conftest import experience
from training.ppo.shaping import RewardScale, estimate_advantages, overlong, shape_scores, td_errors

SCALE = RewardScale(mean=2.0, std=4.0, max_response_length=10)


def config(**changes: Any) -> PPOConfig:
    plain = {"missing_eos_penalty": 0.0, "reward_clip": None, "normalize_reward": False}
    return PPOConfig(**plain | changes)


def shaped(scores: list[float], **changes: Any) -> list[float]:
    return shape_scores([experience(i, score=s) for i, s in enumerate(scores)], config(**changes), SCALE).tolist()


def test_scores_pass_where_nothing_is_asked():
    assert shaped([1.0, -7.0]) == [1.0, -7.0]


def test_scores_are_normalised_by_the_stored_scale_then_clipped():
    assert shaped([2.0, 6.0, -2.0], normalize_reward=True) == [0.0, 1.0, -1.0]
    assert shaped([2.0, 602.0, -1e9], normalize_reward=True, reward_clip=5.0) == [0.0, 5.0, -5.0]


def test_a_scale_without_spread_does_not_divide_by_zero():
    found = shape_scores([experience(1, score=2.0)], config(normalize_reward=True), RewardScale(2.0, 0.0, 10))
    assert found.tolist() == [0.0]


def test_an_answer_without_end_pays_after_clipping():
    answers = [experience(1, score=100.0), experience(1, score=100.0, finished=False)]
    found = shape_scores(answers, config(missing_eos_penalty=1.5, reward_clip=3.0), SCALE)
    assert found.tolist() == [3.0, 1.5]


def test_the_overlong_penalty_rises_over_the_buffer():
    lengths = torch.arange(1.0, 13.0)
    found = overlong(lengths, config(overlong_buffer=4, overlong_penalty=2.0), 10)
    assert found.tolist() == pytest.approx([0, 0, 0, 0, 0, 0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert not overlong(lengths, config(), 10).any()
    answers = [experience(1, tokens=n, score=0.0) for n in (6, 9)]
    assert shape_scores(answers, config(overlong_buffer=4), SCALE).tolist() == [0.0, -0.75]


def round_tensors(seed: int, rows: int = 3, width: int = 5) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=draws)
    mask = torch.arange(width)[None] < lengths[:, None]
    names = ("old_log_probs", "ref_log_probs", "old_values")
    found = {name: torch.where(mask, torch.randn((rows, width), generator=draws), 0.0) for name in names}
    return found | {"mask": mask, "shaped_scores": torch.randn(rows, generator=draws)}


def oracle(t: dict[str, torch.Tensor], kl_coef: float, gamma: float, lam: float, use_kl: bool) -> dict[str, np.ndarray]:
    """Token by token from the definitions, in float64."""
    x = {name: value.double().numpy() if value.dtype != torch.bool else value.numpy() for name, value in t.items()}
    rewards, advantages = np.zeros(x["mask"].shape), np.zeros(x["mask"].shape)
    returns, errors = np.zeros(x["mask"].shape), np.zeros(len(rewards))
    for b in range(len(rewards)):
        length = int(x["mask"][b].sum())
        for r in range(length):
            kl = x["old_log_probs"][b, r] - x["ref_log_probs"][b, r]
            rewards[b, r] = (x["shaped_scores"][b] if r == length - 1 else 0.0) - (kl_coef * kl if use_kl else 0.0)
        running = 0.0
        for r in reversed(range(length)):
            following = x["old_values"][b, r + 1] if r + 1 < length else 0.0
            delta = rewards[b, r] + gamma * following - x["old_values"][b, r]
            running = delta + gamma * lam * running
            advantages[b, r] = running
            returns[b, r] = running + x["old_values"][b, r]
            errors[b] += abs(delta) / length
    valid = advantages[x["mask"]]
    white = np.where(x["mask"], (advantages - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8), 0.0)
    kl = (x["old_log_probs"] - x["ref_log_probs"])[x["mask"]].mean()
    return {
        "rewards": rewards, "advantages": white, "returns": returns, "td": errors, "kl": kl,
        "variance": valid.var(ddof=1),
    }  # fmt: skip


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000), kl_coef=st.floats(0, 2), gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]), use_kl=st.booleans(),
)  # fmt: skip
def test_rewards_advantages_and_errors_match_the_oracle(seed, kl_coef, gamma, lam, use_kl):
    tensors = round_tensors(seed)
    found = estimate_advantages(
        **tensors, ppo=config(gamma=gamma, lam=lam, use_kl_in_reward=use_kl, kl_penalty="k1"), kl_coef=kl_coef
    )
    expected = oracle(tensors, kl_coef, gamma, lam, use_kl)
    if expected["variance"] < 1e-6 or not np.isfinite(expected["variance"]):
        return
    for name in ("rewards", "advantages", "returns"):
        np.testing.assert_allclose(getattr(found, name).double().numpy(), expected[name], atol=2e-4)
        assert not getattr(found, name)[~tensors["mask"]].any()
    assert found.variance == pytest.approx(float(expected["variance"]), rel=1e-4)
    assert found.reward_kl == pytest.approx(float(expected["kl"]), abs=1e-5)
    errors = td_errors(found.rewards, tensors["old_values"], tensors["mask"], gamma)
    np.testing.assert_allclose(errors.double().numpy(), expected["td"], atol=1e-5)


def test_advantages_are_whitened_once_over_the_round():
    tensors = round_tensors(4, rows=64, width=6)
    found = estimate_advantages(**tensors, ppo=config(), kl_coef=0.1)
    valid = found.advantages[tensors["mask"]]
    assert float(valid.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(valid.std()) == pytest.approx(1.0, abs=1e-4)
    half = found.advantages[:32][tensors["mask"][:32]]
    assert abs(float(half.mean())) > 1e-3, "a part was whitened on its own"


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_the_kl_of_the_reward_is_the_kind_asked_for(kind: str):
    tensors = round_tensors(5)
    d = tensors["old_log_probs"] - tensors["ref_log_probs"]
    expected = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": torch.exp(-d) + d - 1}[kind]
    found = estimate_advantages(**tensors, ppo=config(kl_penalty=kind), kl_coef=0.5)
    none = estimate_advantages(**tensors, ppo=config(kl_penalty=kind), kl_coef=0.0)
    paid = torch.where(tensors["mask"], 0.5 * expected.clamp(max=10.0), 0.0)
    torch.testing.assert_close(none.rewards - found.rewards, paid, atol=1e-5, rtol=1e-4)

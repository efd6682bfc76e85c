"""Looking at the policy from outside: the real KL, the same numbers every time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.schema.metric_names import BASELINE_METRICS
from tests.training.ppo.conftest import BuildLoop
from tests.training.stages import PPO
from training.models.layout import Group, build_layout
from training.models.network import Network
from training.ppo.loop import PPOLoop
from training.ppo.probe import Probe, exact_kl, perplexity, selection_score, sequence_kl, token_kl
from training.sft import response_nll

GROUPS = [Group((1, 5, 9), ((7, 8, 2),)), Group((1, 44), ((60, 61, 62, 63, 2),)), Group((1, 9), ((4,),))]


@pytest.fixture
def loop(build_loop: BuildLoop) -> PPOLoop:
    return build_loop()


def stir(network: Network, scale: float, seed: int = 1) -> None:
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters().values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=draws))


def actors(loop: PPOLoop):
    return loop.parts.updater.actors


def test_a_policy_that_is_the_reference_has_no_kl(loop: PPOLoop):
    assert exact_kl(actors(loop).policy, actors(loop).reference, GROUPS, 100) == (0.0, 0.0)


@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0])
def test_the_exact_kl_is_the_vocabularys_sum(loop: PPOLoop, scale: float):
    policy, reference = actors(loop).policy, actors(loop).reference
    stir(policy, scale)
    sums = []
    for group in GROUPS:
        layout = build_layout([group], "padded", 0)
        with torch.no_grad():
            p = policy.logits(layout)[0].double().numpy()
            q = reference.logits(layout)[0].double().numpy()
        log_p = p - np.logaddexp.reduce(p, axis=-1, keepdims=True)
        log_q = q - np.logaddexp.reduce(q, axis=-1, keepdims=True)
        sums.append(float((np.exp(log_p) * (log_p - log_q)).sum()))
    assert all(value > 0 for value in sums)
    for budget in (100, 8):
        assert sequence_kl(policy, reference, GROUPS, budget) == pytest.approx(sums, rel=1e-3, abs=1e-6)
    token_mean, sequence_mean = exact_kl(policy, reference, GROUPS, 100)
    assert token_mean == pytest.approx(sum(sums) / 9, rel=1e-3, abs=1e-6)
    assert sequence_mean == pytest.approx(sum(sums) / 3, rel=1e-3, abs=1e-6)


def test_no_token_has_a_negative_kl(loop: PPOLoop):
    stir(actors(loop).policy, 1e-4)
    layout = build_layout(GROUPS, "padded", 0)
    found = token_kl(actors(loop).policy, actors(loop).reference, layout)
    assert (found >= 0).all()
    assert not found[~layout.response_mask].any()


def test_the_kl_is_what_sampled_log_ratios_estimate(loop: PPOLoop):
    """Over many samples the plain estimate comes to the exact one."""
    policy, reference = actors(loop).policy, actors(loop).reference
    stir(policy, 0.15)
    prober = loop.parts.prober
    prober.prompts = [prober.prompts[0]] * 600
    kept: list[list[Group]] = []
    prober.scorer.scores, scores = (lambda questions: scores(kept.append(questions) or questions)), prober.scorer.scores
    probe = prober.measure(600)
    groups = [Group(q.prompt.token_ids, (q.response_ids,)) for q in kept[0]]
    ratio = [
        theirs - ours
        for ours, theirs in zip(
            response_nll(policy, groups, 20_000), response_nll(reference, groups, 20_000), strict=True
        )
    ]
    error = np.std(ratio) / math.sqrt(600)
    assert abs(np.mean(ratio) - probe.kl_ref_sequence) < 4 * error
    assert probe.kl_ref_sequence > 8 * error


def test_probes_differ_by_the_policy_alone(loop: PPOLoop):
    first = loop.parts.prober.measure(8)
    torch.rand(5)
    assert loop.parts.prober.measure(8) == first
    assert first.kl_ref == first.kl_ref_sequence == 0.0
    stir(actors(loop).policy, 0.3)
    moved = loop.parts.prober.measure(8)
    assert moved.kl_ref > 0
    assert moved != first
    assert tuple(first.metrics()) == BASELINE_METRICS[:-2]


def test_a_probe_by_hand(loop: PPOLoop):
    prober, seen = loop.parts.prober, []
    prober.scorer.scores, scores = (lambda questions: scores(seen.extend(questions) or questions)), prober.scorer.scores
    probe = prober.measure(5)
    assert len(seen) == 5
    assert probe.scores == tuple(scores(seen).tolist())
    raw = float(scores(seen).mean())
    assert probe.heldout_reward == pytest.approx((raw - prober.scorer.mean) / prober.scorer.std, rel=1e-5)
    lengths = [len(q.response_ids) for q in seen]
    assert probe.response_length == pytest.approx(np.mean(lengths))
    eos = actors(loop).encoder.tokenizer.eos_token_id
    assert probe.eos_rate == pytest.approx(np.mean([q.response_ids[-1] == eos for q in seen]))


def test_perplexity_is_the_exponential_of_the_mean_loss(loop: PPOLoop):
    policy = actors(loop).policy
    found = perplexity(policy, GROUPS, 100)
    assert found == pytest.approx(math.exp(sum(response_nll(policy, GROUPS, 100)) / 9), rel=1e-6)
    assert found == pytest.approx(perplexity(policy, GROUPS, 8), rel=1e-5)


def test_an_endless_perplexity_stays_a_number(loop: PPOLoop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("training.ppo.probe.negative_log_likelihood", lambda *_: 1e9)
    assert math.isfinite(perplexity(actors(loop).policy, GROUPS, 100))


def test_selection_prices_drift():
    probe = Probe(kl_ref=0.25, kl_ref_sequence=5.0, heldout_reward=1.0, response_length=3.0, eos_rate=1.0)
    ppo = PPO.model_copy(update={"selection_kl_cost": 2.0})
    assert selection_score(probe, ppo) == 0.5
    assert math.isnan(selection_score(replace(probe, heldout_reward=math.nan), ppo))

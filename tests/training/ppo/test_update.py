"""One PPO step: any split into microbatches is the same step, and what is not finite moves nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.models import ModelsConfig
from tests.training.ppo.conftest import BuildLoop
from tests.training.stages import MODELS, PPO, REPLAY
from training.errors import DataError
from training.objectives import aggregate, kl_penalty, policy_loss, value_fit, value_loss
from training.ppo.experience import Experience
from training.ppo.loop import PPOLoop
from training.ppo.update import UpdateSettings, offpolicy_kl, round_weight_metrics

TRAIN = UpdateSettings(0.2, 0.2)


def opened(
    build_loop: BuildLoop, name: str = "ppo", stir: float = 0.0, models: ModelsConfig = MODELS, **changes: Any
) -> PPOLoop:
    """A loop with its first round open, and its networks moved on since by some noise."""
    loop = build_loop(name, ppo=PPO.model_copy(update={"critic_warmup_rounds": 0} | changes), models=models)
    loop.state.sampler.add(loop.state.pool.num_stored)
    loop._open_round()
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for network in (loop.state.policy, loop.state.critic):
            for parameter in network.parameters().values():
                parameter.add_(stir * torch.randn(parameter.shape, generator=draws))
    return loop


def minibatch(loop: PPOLoop, rows: list[int]) -> Any:
    return loop.parts.updater.minibatch(rows, loop.state.pool.take(loop.state.batch.indices.tolist()))


def both(loop: PPOLoop) -> dict[str, torch.Tensor]:
    """The weights of policy and critic."""
    return loop.state.policy.tensors() | {f"critic {n}": t for n, t in loop.state.critic.tensors().items()}


def gradients(loop: PPOLoop, rows: list[int]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Accumulated gradients of both networks, caught before the optimisers throw them away."""
    caught: dict[str, torch.Tensor] = {}
    for name, engine in (("actor", loop.state.actor), ("critic", loop.state.critic_engine)):

        def catch(loss_is_finite: bool = True, name: str = name, engine: Any = engine, step: Any = engine.step) -> Any:
            found = {key: p.grad for key, p in engine.parameters.items() if p.grad is not None}
            caught.update({f"{name}.{key}": gradient.clone() for key, gradient in found.items()})
            return step(loss_is_finite)

        engine.step = catch
    metrics = loop.parts.updater.step(minibatch(loop, rows), loop.state.batch, TRAIN)
    return caught, metrics


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
EXTRAS = [{}, {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}, {"entropy_coeff": 0.1}]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", EXTRAS, ids=["plain", "kl loss", "entropy"])
def test_microbatches_add_up_to_the_whole_minibatch(build_loop: BuildLoop, mode: str, extra: dict):
    rows = [9, 2, 11, 4, 0, 7]
    found = []
    for budget in (8192, 150, 80):
        loop = opened(build_loop, f"budget-{budget}", 0.05, ppo_max_token_len=budget, loss_agg_mode=mode, **extra)
        assert (len(loop.parts.updater.microbatches(minibatch(loop, rows))) == 1) == (budget == 8192)
        found.append(gradients(loop, rows))
    (whole, metrics), *parts = found
    scale = max(float(g.abs().max()) for g in whole.values())
    for caught, other in parts:
        assert caught.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(caught[name], gradient, atol=1e-6 * max(1.0, scale), rtol=0)
        for name, value in metrics.items():
            if name != "tokens_per_second":
                assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_a_steps_metrics_are_those_of_the_objectives(build_loop: BuildLoop):
    """The whole minibatch in one layout, the losses called by hand."""
    loop = opened(build_loop, stir=0.05, use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.1, ppo_max_token_len=100)
    rows = [3, 1, 8, 5]
    batch, updater = loop.state.batch, loop.parts.updater
    chosen = minibatch(loop, rows)
    layout = updater.layout(chosen.experiences)
    mask, width = layout.response_mask, layout.response_mask.shape[1]
    data = {name: tensor[rows, :width] for name, tensor in batch.tensors().items() if tensor.ndim == 2}
    with torch.no_grad():
        log_probs, entropy = updater.actors.policy.log_probs_and_entropy(layout)
        values = updater.actors.critic.values(layout)
    policy = policy_loss(log_probs, data["old_log_probs"], data["advantages"], mask, weights=data["weights"])
    value = value_loss(values, data["old_values"], data["returns"], mask, cliprange_value=0.5, weights=data["weights"])
    kl_loss = aggregate(kl_penalty(log_probs, data["ref_log_probs"], "k3"), mask, "token-mean")
    ratio = torch.exp(log_probs - data["old_log_probs"])[mask]
    metrics = updater.step(chosen, batch, TRAIN)
    expected = {
        "policy_loss": policy.loss, "clip_frac": policy.clip_frac, "clip_frac_lower": policy.clip_frac_lower,
        "approx_kl": policy.approx_kl, "value_loss": value.loss, "value_clip_frac": value.clip_frac,
        "entropy": entropy[mask].mean(), "ratio_mean": ratio.mean(), "ratio_gap": (ratio - 1).abs().mean(),
        "ratio_gap_max": (ratio - 1).abs().max(),
        "actor_loss": policy.loss + 0.5 * kl_loss - 0.1 * entropy[mask].mean(),
        "explained_variance": value_fit(values, data["returns"], mask).explained_variance(),
    }  # fmt: skip
    for name, number in expected.items():
        assert metrics[name] == pytest.approx(float(number), rel=1e-4, abs=1e-5), name
    assert metrics["loss"] == pytest.approx(metrics["actor_loss"] + metrics["value_loss"], rel=1e-6)
    assert metrics["kl_ref_offpolicy"] >= 0
    assert metrics["applied"] == 1.0


def test_the_first_minibatch_has_ratio_exactly_one(build_loop: BuildLoop):
    for budget in (8192, 150):
        loop = opened(build_loop, f"budget-{budget}", ppo_max_token_len=budget)
        rows = loop._plan(0, len(loop.state.batch.indices))[0]
        metrics = loop.parts.updater.step(minibatch(loop, rows), loop.state.batch, TRAIN)
        assert metrics["ratio_gap_max"] == 0.0
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-12)
        assert (metrics["approx_kl"], metrics["clip_frac"], metrics["clip_frac_lower"]) == (0.0, 0.0, 0.0)


def test_a_step_moves_both_networks_and_only_them(build_loop: BuildLoop):
    loop = opened(build_loop)
    frozen = {n: p.detach().clone() for n, p in loop.state.policy.backbone.base.named_parameters() if "lora" not in n}
    policy, critic = loop.state.policy.tensors(), loop.state.critic.tensors()
    loop.parts.updater.step(minibatch(loop, [0, 1, 2]), loop.state.batch, TRAIN)
    assert any(not torch.equal(t, policy[n]) for n, t in loop.state.policy.tensors().items())
    assert any(not torch.equal(t, critic[n]) for n, t in loop.state.critic.tensors().items())
    for name, parameter in loop.state.policy.backbone.base.named_parameters():
        assert name not in frozen or torch.equal(parameter, frozen[name])


def test_warming_up_the_critic_leaves_the_policy_alone(build_loop: BuildLoop):
    loop = opened(build_loop)
    policy, critic = loop.state.policy.tensors(), loop.state.critic.tensors()
    metrics = loop.parts.updater.step(
        minibatch(loop, [0, 1, 2]), loop.state.batch, UpdateSettings(0.2, 0.2, train_policy=False)
    )
    assert all(torch.equal(t, policy[n]) for n, t in loop.state.policy.tensors().items())
    assert not torch.equal(loop.state.critic.tensors()["head.bias"], critic["head.bias"])
    assert metrics["applied"] == 1.0
    assert metrics["loss"] == metrics["value_loss"]
    assert not {"policy_loss", "actor_loss", "ratio_mean", "ratio_gap_max", "grad_norm", "learning_rate"} & set(metrics)
    assert metrics["kl_ref_offpolicy"] == pytest.approx(0.0, abs=1e-6), "drift is told at every step, warming up or not"
    assert loop.state.actor.steps_done == 0


@pytest.mark.parametrize("spoilt", ["advantages", "returns", "ref_log_probs"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_moves_nothing(build_loop: BuildLoop, spoilt: str, poison: float):
    loop = opened(build_loop, use_kl_loss=True, kl_loss_type="k1")
    getattr(loop.state.batch, spoilt)[1, 0] = poison
    before = both(loop)
    metrics = loop.parts.updater.step(minibatch(loop, [0, 1, 2]), loop.state.batch, TRAIN)
    after = both(loop)
    assert metrics["applied"] == 0.0
    assert not math.isfinite(metrics["loss"])
    assert all(torch.equal(after[n], t) for n, t in before.items())
    clean = loop.parts.updater.step(minibatch(loop, [3, 4]), loop.state.batch, TRAIN)
    assert clean["applied"] == 1.0


@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_is_seen_and_moves_neither_network(build_loop: BuildLoop, whose: str):
    loop = opened(build_loop)
    network = loop.state.policy if whose == "policy" else loop.state.critic
    parameter = next(p for n, p in network.parameters().items() if "lora_B" in n or n == "head.weight")
    handle = parameter.requires_grad_(True).register_hook(lambda gradient: gradient * math.nan)
    before = both(loop)
    metrics = loop.parts.updater.step(minibatch(loop, [0, 1, 2]), loop.state.batch, TRAIN)
    handle.remove()
    assert metrics["applied"] == 0.0
    assert math.isfinite(metrics["loss"])
    norms = {"policy": metrics["grad_norm"], "critic": metrics["critic_grad_norm"]}
    assert [name for name, norm in norms.items() if math.isnan(norm)] == [whose]
    assert all(torch.equal(t, before[n]) for n, t in both(loop).items())
    assert loop.parts.updater.step(minibatch(loop, [0, 1, 2]), loop.state.batch, TRAIN)["applied"] == 1.0
    assert any(not torch.equal(t, before[n]) for n, t in both(loop).items())


def test_a_microbatch_never_exceeds_the_budget(build_loop: BuildLoop):
    loop = opened(build_loop, ppo_max_token_len=120)
    batch = minibatch(loop, list(range(16)))
    pieces = loop.parts.updater.microbatches(batch)
    assert sorted(i for piece in pieces for i in piece) == list(range(16))
    for piece in pieces:
        assert loop.parts.updater.layout([batch.experiences[i] for i in piece]).num_tokens <= 120


def test_microbatches_of_a_fixed_number_add_up_as_well(build_loop: BuildLoop):
    rows, found = [9, 2, 11, 4, 0], []
    for name, changes in (("dynamic", {}), ("fixed", {"use_dynamic_bsz": False, "ppo_micro_batch_size": 2})):
        loop = opened(build_loop, name, 0.05, **changes)
        pieces = loop.parts.updater.microbatches(minibatch(loop, rows))
        assert sorted(map(len, pieces)) == ([5] if name == "dynamic" else [1, 2, 2])
        found.append(gradients(loop, rows)[0])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=2e-6, rtol=1e-5)


def cut(answer: Experience, number: int) -> Experience:
    """Every other answer so short that several of them fit a row."""
    short = replace(answer, prompt_ids=answer.prompt_ids[:2], response_ids=answer.response_ids[:2])
    return short if number % 2 else answer


def test_a_step_on_packed_rows_is_the_same_step(build_loop: BuildLoop):
    """Ratio exactly 1 first, then after a move the gradients of padded rows; whole sequences share a row."""
    rows, found, slots = [9, 2, 11, 4, 0, 7], {}, {}
    for kind in ("padded", "packed"):
        loop = opened(build_loop, kind, models=MODELS.model_copy(update={"layout": kind}), ppo_max_token_len=200)
        first = loop.parts.updater.step(minibatch(loop, loop._plan(0, 16)[0]), loop.state.batch, TRAIN)
        assert first["ratio_gap_max"] == 0.0
        moved = opened(build_loop, f"{kind}-moved", 0.05, models=MODELS.model_copy(update={"layout": kind}))
        take = moved.state.pool.take
        moved.state.pool.take = lambda indices, take=take: [cut(e, i) for i, e in enumerate(take(indices))]
        chosen = minibatch(moved, rows)
        order = [i for piece in moved.parts.updater.microbatches(chosen) for i in piece]
        slots[kind] = moved.parts.updater.layout([chosen.experiences[i] for i in order]).num_tokens
        found[kind] = gradients(moved, rows)[0]
    assert slots["packed"] < slots["padded"]
    for name, gradient in found["padded"].items():
        torch.testing.assert_close(found["packed"][name], gradient, atol=2e-6, rtol=1e-4)


def test_an_answer_beyond_the_budget_is_named(build_loop: BuildLoop):
    loop = opened(build_loop)
    loop.parts.updater.ppo = loop.ppo.model_copy(update={"ppo_max_token_len": 20})
    batch = minibatch(loop, [0, 1])
    longest = max(batch.experiences, key=lambda e: len(e.prompt_ids) + len(e.response_ids))
    with pytest.raises(DataError, match=longest.prompt_id):
        loop.parts.updater.step(batch, loop.state.batch, TRAIN)


def test_clip_ratios_come_from_the_settings(build_loop: BuildLoop):
    fractions = []
    for clip in (0.01, 0.9):
        loop = opened(build_loop, f"clip-{clip}", stir=0.1)
        metrics = loop.parts.updater.step(minibatch(loop, [0, 1, 2]), loop.state.batch, UpdateSettings(clip, clip))
        fractions.append(metrics["clip_frac"])
    assert fractions[0] > 0.2 > fractions[1]


floats = st.floats(-8, 8, width=32)


@given(st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=8))
def test_the_offpolicy_kl_is_never_negative(triples):
    log_probs, behavior, reference = (torch.tensor([row]) for row in zip(*triples, strict=True))
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    found = offpolicy_kl(log_probs, behavior, reference, mask)
    assert (found >= 0).all()
    d = (log_probs - reference).double().numpy()
    k3 = np.minimum(np.exp(-np.clip(d, -20, 20)) + np.clip(d, -20, 20) - 1, 10)
    weight = np.minimum(np.exp((log_probs - behavior).double().numpy()), 2.0)
    np.testing.assert_allclose(found.double().numpy(), weight * k3, rtol=1e-3, atol=1e-4)
    assert not offpolicy_kl(reference, behavior, reference, mask).any()


def test_masked_tokens_may_hold_anything():
    mask = torch.tensor([[True, False]])
    values = torch.tensor([[-1.0, math.nan]])
    assert offpolicy_kl(values, values, values, mask).tolist() == [[0.0, 0.0]]


def test_weight_metrics_are_per_answer():
    weights = torch.tensor([[1.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = round_weight_metrics(weights, mask)
    assert found["importance_weight_mean"] == pytest.approx(2.0)
    assert found["effective_sample_fraction"] == pytest.approx((1 + 3) ** 2 / (2 * (1 + 9)))
    assert REPLAY.importance_weights

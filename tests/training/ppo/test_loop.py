"""The rounds as a whole: what is measured, when a round ends, which policy is handed on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema.guards import GuardRule
from configs.schema.metric_names import BASELINE_METRICS, STEP_METRICS
from configs.schema.ppo import KLControlConfig
from tests.training.ppo.conftest import BuildLoop, loop_of
from tests.training.stages import GUARDS, PPO, REPLAY, ROLLOUT
from training.contract import METRICS
from training.errors import StageError
from training.ppo.loop import PPOLoop
from training.ppo.probe import selection_score
from training.recorder import read_lines


def lines(loop: PPOLoop) -> list[dict[str, Any]]:
    return read_lines(loop.context.directory / METRICS)


def events(loop: PPOLoop, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(loop) if line.get("event") == kind]


def steps(loop: PPOLoop) -> list[dict[str, Any]]:
    """Lines of optimiser steps, without those of probes between rounds."""
    return [line for line in lines(loop) if "value_loss" in line]


def ran(build_loop: BuildLoop, name: str = "ppo", ppo: dict[str, Any] | None = None, **sections: Any) -> PPOLoop:
    loop = build_loop(name, ppo=PPO.model_copy(update=ppo or {}), **sections)
    loop.run()
    return loop


def test_every_round_takes_its_steps(build_loop: BuildLoop):
    """3 rounds x 2 epochs x 16 / 8 answers, the first round for the critic alone."""
    loop = ran(build_loop)
    assert [line["step"] for line in steps(loop)] == list(range(1, 13))
    assert (loop.state.cursor.step, loop.state.cursor.applied, loop.state.cursor.round) == (12, 8, 3)
    assert (loop.state.actor.steps_done, loop.state.critic_engine.steps_done) == (8, 12)
    assert (loop.state.actor.settings.total_steps, loop.state.critic_engine.settings.total_steps) == (8, 12)
    assert [("policy_loss" in line) for line in steps(loop)] == [False] * 4 + [True] * 8
    assert [event["answers"] for event in events(loop, "round")] == [16, 16, 16]
    assert len(loop.state.pool.fresh) == 3 * 12
    assert not events(loop, "early_stop")


def test_the_first_step_of_a_round_has_ratio_one(build_loop: BuildLoop):
    loop = ran(build_loop)
    ratios = [line["ratio_mean"] for line in steps(loop) if "ratio_mean" in line]
    assert ratios[0] == pytest.approx(1.0, abs=1e-9)
    assert ratios[4] == pytest.approx(1.0, abs=1e-9)
    gaps = [line["ratio_gap_max"] for line in steps(loop) if "ratio_gap_max" in line]
    assert gaps[0] == gaps[4] == 0.0, "exactly, token by token"
    assert all(abs(ratio - 1) > 1e-6 for ratio in ratios[1:4])


def test_a_ratio_that_is_not_one_ends_the_run(build_loop: BuildLoop):
    """As when the old pass and the update lay the answers out differently."""
    loop = build_loop()
    make = loop.parts.maker.make

    def spoilt(*arguments: Any) -> Any:
        batch, metrics = make(*arguments)
        batch.old_log_probs += 0.01 * batch.response_mask
        return batch, metrics

    loop.parts.maker.make = spoilt
    with pytest.raises(StageError, match=r"first minibatch of round 1 has ratio 0.99\d+, not 1"):
        loop.run()


def test_ratios_that_are_one_on_average_only_end_the_run(build_loop: BuildLoop):
    loop = build_loop()
    make = loop.parts.maker.make

    def spoilt(choice: Any, order: list[int], kl_coef: float) -> Any:
        batch, metrics = make(choice, order, kl_coef)
        first = order[: loop.ppo.ppo_mini_batch_size]
        batch.old_log_probs[first, 0] += torch.tensor([0.9, 1.1] * (len(first) // 2)).log()
        return batch, metrics

    loop.parts.maker.make = spoilt
    with pytest.raises(
        StageError, match=r"first minibatch of round 1 has ratio (1\.|0\.99).*off by up to [0-9.]+e-0\d at a token"
    ):
        loop.run()


def test_one_token_that_is_off_ends_the_run_before_anything_is_learnt_from_it(build_loop: BuildLoop):
    loop = build_loop()
    make = loop.parts.maker.make

    def spoilt(choice: Any, order: list[int], kl_coef: float) -> Any:
        batch, metrics = make(choice, order, kl_coef)
        batch.old_log_probs[order[0], 0] -= math.log(1.008)
        return batch, metrics

    loop.parts.maker.make = spoilt
    policy = loop.state.policy.tensors()
    with pytest.raises(StageError, match=r"first minibatch of round 1(.|\n)*off by up to 8\.0\de-03"):
        loop.run()
    assert all(torch.equal(t, policy[n]) for n, t in loop.state.policy.tensors().items())
    assert loop.state.critic_engine.steps_done == 4, "neither network takes the step"


def test_what_guards_may_watch_is_what_is_measured(build_loop: BuildLoop):
    """No name too many, no name too few."""
    loop = ran(build_loop)
    recorded = [set(line) - {"step", "time", "nonfinite"} for line in lines(loop) if "event" not in line]
    assert set(recorded[0]) - {"selection_score"} == set(BASELINE_METRICS)
    assert set().union(*recorded) - {"selection_score"} == set(STEP_METRICS)


def test_probes_come_when_they_are_due(build_loop: BuildLoop):
    loop = ran(build_loop)
    assert [line["step"] for line in steps(loop) if "kl_ref" in line] == [3, 6, 9], "12 is looked at after its round"
    assert [line["step"] for line in steps(loop) if "perplexity" in line] == [4, 8]
    between = [line for line in lines(loop) if "selection_score" in line]
    assert [line["step"] for line in between] == [8, 12]
    assert "perplexity" in between[-1], "the end of the run is looked at in any case"
    assert all(line["kl_ref"] > 0 for line in between)
    assert lines(loop)[0]["kl_ref"] == 0.0


def watch_guards(loop: PPOLoop) -> list[dict[str, float]]:
    """What the guards are shown: each time the metrics, with the step, and what a baseline is taken from."""
    seen, observe = [], loop.parts.guards.observe

    def observed(step: int, metrics: dict[str, float], *rest: Any, **more: Any) -> Any:
        seen.append({"at": step, **metrics})
        return observe(step, metrics, *rest, **more)

    loop.parts.guards.observe = observed
    return seen


@pytest.mark.parametrize("early", [False, True])
def test_no_policy_is_shown_to_the_guards_twice(build_loop: BuildLoop, early: bool):
    """A look that is due with a round's last step is the one after it; patience would count one policy twice."""
    changes = {"max_approx_kl": 1e-7, "actor_lr": 1e-2} if early else {}
    guards = GUARDS.model_copy(update={"kl_probe_steps": 1, "perplexity_steps": 1})
    loop = build_loop(ppo=PPO.model_copy(update=changes), guards=guards)
    seen = watch_guards(loop)
    loop.run()
    for name in ("kl_ref", "response_length", "perplexity"):
        at = [metrics["at"] for metrics in seen if name in metrics]
        assert len(at) == len(set(at)), name
    assert len(events(loop, "early_stop")) == (2 if early else 0)
    assert {metrics["at"] for metrics in seen if "kl_ref" in metrics} == set(range(1, loop.state.cursor.step + 1))


def test_a_look_within_a_round_is_held_against_the_same_prompts(build_loop: BuildLoop):
    """Fewer of them than at a round's end: their answers may be longer by nature, which is no growth."""
    rule = GuardRule(metric="response_length", op=">", threshold=1.3, relative_to="baseline", action="stop")
    guards = GUARDS.model_copy(update={"rules": [rule], "kl_probe_prompts": 2, "kl_probe_steps": 2})
    loop = build_loop(guards=guards, ppo=PPO.model_copy(update={"actor_lr": 1e-9}))
    measure = loop.parts.prober.measure

    def longer(limit: int) -> Any:
        return replace(measure(limit), response_length=9.0 if limit == 2 else 6.0)

    loop.parts.prober.measure = longer
    loop.run()
    assert loop.parts.guards.fired == []
    assert loop.parts.guards.baseline["response_length"] == 6.0
    again = loop_of(loop.context.directory)
    again._resume()
    assert again.parts.guards.state_dict() == loop.parts.guards.state_dict()
    loop.parts.prober.measure = lambda limit: replace(measure(limit), response_length=12.0)
    judged = loop.parts.guards.observe(99, loop.onlooker.within_round(98), within_round=True)
    assert [firing.limit for firing in judged] == [pytest.approx(11.7)]


def test_while_the_critic_warms_up_guards_and_controller_see_the_policy_that_came(build_loop: BuildLoop):
    """One that came far from the reference: the rule fires after the first round, the penalty rises."""
    control = KLControlConfig(kl_coef=0.05, target_kl=0.005, horizon=100)
    rule = GuardRule(metric="kl_ref", op=">", threshold=0.006, action="warn", name="far")
    sections = {"guards": GUARDS.model_copy(update={"rules": [rule], "kl_probe_steps": 1_000})}
    loop = build_loop(ppo=PPO.model_copy(update={"kl_ctrl": control, "critic_warmup_rounds": 2}), **sections)
    stir(loop.state.policy)
    loop.run()
    came = lines(loop)[0]
    assert came["kl_ref"] > 0.01
    first = [line for line in lines(loop) if line.get("step") in (4, 8) and "kl_ref" in line and "event" not in line]
    assert [(line["step"], line["kl_ref"], line["response_length"]) for line in first] == [
        (step, came["kl_ref"], came["response_length"]) for step in (4, 8)
    ]
    assert [event["step"] for event in events(loop, "guard")][:2] == [4, 8]
    grown = 1 + 0.2 * 16 / 100
    coefs = [line["kl_coef"] for line in steps(loop)]
    assert coefs == pytest.approx([0.05] * 4 + [0.05 * grown] * 4 + [0.05 * grown**2] * 4)


def stir(policy: Any) -> None:
    """As if it had been trained on an earlier night."""
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=draws))


def test_warming_up_beside_the_reference_leaves_the_penalty_alone(build_loop: BuildLoop):
    """That a policy which nobody trained has not moved does not say that it is held too tightly."""
    loop = ran(build_loop, ppo={"kl_ctrl": KLControlConfig(kl_coef=0.05, target_kl=0.1, horizon=100)})
    assert [line["kl_coef"] for line in steps(loop)][:8] == [0.05] * 8


def test_priorities_are_refreshed_when_due(build_loop: BuildLoop):
    loop = build_loop(replay=REPLAY.model_copy(update={"refresh_steps": 5}))
    calls, refresh = [], loop.parts.maker.refresh
    loop.parts.maker.refresh = lambda batch: (calls.append(loop.state.cursor.step), refresh(batch))
    loop.run()
    assert calls == [5, 10]


def test_beta_reaches_its_end_with_the_last_round(build_loop: BuildLoop):
    loop = build_loop()
    betas, sample = [], loop.state.sampler.sample
    loop.state.sampler.sample = lambda *a: (betas.append(loop.state.sampler.beta), sample(*a))[1]
    loop.run()
    assert betas[0] == pytest.approx(0.4)
    assert betas[-1] == pytest.approx(1.0)
    assert betas == sorted(betas)


def test_a_policy_that_moved_too_far_ends_the_round(build_loop: BuildLoop):
    loop = ran(build_loop, ppo={"max_approx_kl": 1e-7, "actor_lr": 1e-2})
    told = events(loop, "early_stop")
    assert told
    assert all(event["approx_kl"] > event["limit"] == 1e-7 for event in told)
    for event in told:  # nothing of its round comes after it
        after = next((line for line in steps(loop) if line["step"] == event["step"] + 1), None)
        assert after is None or after["ratio_mean"] == pytest.approx(1.0, abs=1e-9)
    assert loop.state.cursor.step < 12
    assert loop.state.cursor.round == 3


def test_a_distance_that_is_not_finite_ends_the_round_in_words(build_loop: BuildLoop):
    loop = build_loop(ppo=PPO.model_copy(update={"max_approx_kl": 0.1}))
    assert loop._moved_too_far({"approx_kl": math.inf})
    (told,) = events(loop, "early_stop")
    assert (told["approx_kl"], told["limit"], told["nonfinite"]) == (None, 0.1, ["approx_kl"])


def test_the_kl_coefficient_follows_the_measured_kl(build_loop: BuildLoop):
    control = KLControlConfig(kl_coef=0.05, target_kl=1e-9, horizon=100)
    loop = ran(build_loop, ppo={"kl_ctrl": control})
    coefs = [line["kl_coef"] for line in steps(loop)]
    # far above its target: the error is clipped at 0.2, 16 answers a round over a horizon of 100
    grown = 1 + 0.2 * 16 / 100
    assert coefs == pytest.approx([0.05] * 8 + [0.05 * grown] * 4)
    assert loop.state.kl.kl_coef == pytest.approx(0.05 * grown**2)
    fixed = build_loop("fixed", ppo=PPO.model_copy(update={"kl_ctrl": KLControlConfig(type="fixed", kl_coef=0.03)}))
    fixed.state.kl.update(9.0, 100)
    assert fixed.state.kl.kl_coef == 0.03


def test_the_best_round_is_handed_on(build_loop: BuildLoop):
    loop = build_loop(ppo=PPO.model_copy(update={"rounds": 5}))
    kept: dict[int, dict[str, torch.Tensor]] = {}
    scores = iter([0.0, 1.0, 3.0, 2.0, math.nan])
    measure = loop.parts.prober.measure

    def scored(limit: int) -> Any:
        probe = measure(limit)
        if limit == loop.ppo.selection_prompts:  # not a guard's look
            object.__setattr__(probe, "heldout_reward", next(scores))
            object.__setattr__(probe, "kl_ref", 0.0)
            kept[loop.state.cursor.round] = loop.state.policy.tensors()
        return probe

    loop.parts.prober.measure = scored
    loop.run()
    assert loop.state.best.round == 3
    assert loop.state.best.score == 3.0
    assert loop.state.best.probe["heldout_reward"] == 3.0
    assert [event["round"] for event in events(loop, "best_round")] == [0, 2, 3]
    assert all(torch.equal(t, kept[3][n]) for n, t in loop.state.policy.tensors().items())
    assert any(not torch.equal(t, kept[5][n]) for n, t in loop.state.policy.tensors().items())


def test_a_policy_that_only_got_worse_is_not_handed_on(build_loop: BuildLoop):
    loop = ran(build_loop, ppo={"selection_kl_cost": 1e9})
    assert loop.state.best.round == 0
    reference = loop.parts.updater.actors.reference
    policy = loop.parts.updater.actors.policy
    groups = loop.parts.prober.held_out[:2]
    from training.sft import response_nll

    assert response_nll(policy, groups, 500) == response_nll(reference, groups, 500)


def test_without_selection_the_last_round_is_handed_on(build_loop: BuildLoop):
    loop = build_loop(ppo=PPO.model_copy(update={"select_best": False, "selection_kl_cost": 1e9}))
    kept: list[dict[str, torch.Tensor]] = []
    end = loop._end_round
    loop._end_round = lambda: (kept.append(loop.state.policy.tensors()), end())
    loop.run()
    assert loop.state.best.round == 3
    assert all(torch.equal(t, kept[-1][n]) for n, t in loop.state.policy.tensors().items())


def test_the_average_of_the_policy_by_hand(build_loop: BuildLoop):
    loop = build_loop(ppo=PPO.model_copy(update={"ema_decay": 0.7, "select_best": False}))
    expected = loop.state.policy.tensors()
    seen: list[dict[str, torch.Tensor]] = []
    step = loop.parts.updater.step

    def watched(*arguments: Any) -> Any:
        metrics = step(*arguments)
        seen.append(loop.state.policy.tensors())
        return metrics

    loop.parts.updater.step = watched
    loop.run()
    for tensors in seen:
        expected = {name: 0.7 * e + 0.3 * tensors[name] for name, e in expected.items()}
    for name, tensor in loop.state.policy.tensors().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)
    assert any(not torch.allclose(t, seen[-1][n]) for n, t in loop.state.policy.tensors().items())


def test_training_goes_on_from_the_policy_not_from_its_average(build_loop: BuildLoop):
    runs = {decay: ran(build_loop, f"ema-{decay}", ppo={"ema_decay": decay}) for decay in (None, 0.9)}
    losses = [[line["policy_loss"] for line in steps(loop) if "policy_loss" in line] for loop in runs.values()]
    assert losses[0][:4] == losses[1][:4]
    assert losses[0][4:] == losses[1][4:]


def test_beside_an_average_guards_and_controller_see_the_current_policy(build_loop: BuildLoop):
    """The average is looked at for itself, under its own names: it is what is handed on, and what is chosen by."""
    control = KLControlConfig(kl_coef=0.05, target_kl=0.005, horizon=100)
    changes = {"ema_decay": 0.999, "actor_lr": 1e-2, "kl_ctrl": control, "rounds": 4}
    loop = build_loop(ppo=PPO.model_copy(update=changes))
    policy, prober, coefs = loop.state.policy, loop.parts.prober, []
    ends, judged, update, end = [], watch_guards(loop), loop.state.kl.update, loop._end_round

    def ended() -> None:
        ema = {name: tensor.clone() for name, tensor in loop.state.ema.items()}
        ends.append((loop.state.cursor.step, policy.tensors(), ema))
        judged.clear()
        end()
        if ends[-1][0] > 4:
            ends[-1] += (judged[-1], coefs[-1])

    loop.state.kl.update = lambda kl, n: (coefs.append(kl), update(kl, n))
    loop._end_round = ended
    loop.run()
    told = {line["step"]: line for line in lines(loop) if "selection_score" in line}
    scores = {}
    for step, current, ema, metrics, controlled in ends[1:]:
        policy.load_tensors(current)
        now = prober.measure(loop.ppo.selection_prompts)
        policy.load_tensors(ema)
        average = prober.measure(loop.ppo.selection_prompts)
        assert now.kl_ref > 1.5 * average.kl_ref, "the two differ"
        assert told[step]["kl_ref"] == metrics["kl_ref"] == controlled == now.kl_ref
        assert told[step]["ema/kl_ref"] == average.kl_ref
        assert told[step]["selection_score"] == selection_score(average, loop.ppo)
        scores[step] = told[step]["selection_score"]
    best = events(loop, "best_round")[-1]
    if best["round"] > 0:
        assert best["score"] == max(scores.values())
        assert loop.state.best.probe["kl_ref"] == told[4 * best["round"]]["ema/kl_ref"]
    assert told[16]["ema/perplexity"] != told[16]["perplexity"]


def test_a_run_that_applied_no_policy_step_fails(build_loop: BuildLoop):
    """The critic's steps do not count."""
    loop = build_loop()
    step = loop.state.actor.step
    loop.state.actor.step = lambda loss_is_finite=True: step(False)
    with pytest.raises(StageError, match="no optimiser step of the policy was applied"):
        loop.run()
    assert [line["applied"] for line in steps(loop)] == [1.0] * 4 + [0.0] * 8


def test_stored_answers_alone_will_do(build_loop: BuildLoop):
    loop = ran(build_loop, rollout=ROLLOUT.model_copy(update={"n": 0}))
    assert loop.state.pool.fresh == []
    assert {line["fresh_share"] for line in steps(loop)} == {0.0}
    assert loop.state.cursor.applied == 8


def test_selection_uses_the_held_out_prompts(build_loop: BuildLoop):
    loop = ran(build_loop)
    train = {e.prompt_id for e in loop.state.pool.fresh}
    assert train.isdisjoint(p.prompt_id for p in loop.parts.prober.prompts)
    last = [line for line in lines(loop) if "selection_score" in line][-1]
    probe = loop.parts.prober.measure(loop.ppo.selection_prompts)
    if loop.state.best.round == 3:
        assert last["selection_score"] == selection_score(probe, loop.ppo)


def test_the_same_seed_is_the_same_run_and_another_is_not(build_loop: BuildLoop):
    def history(name: str, **ppo: Any) -> str:
        kept = [
            {k: v for k, v in line.items() if k not in ("time", "tokens_per_second")}
            for line in lines(ran(build_loop, name, ppo=ppo))
        ]
        return json.dumps(kept)

    first = history("one")
    assert history("two") == first
    assert history("other", actor_lr=2e-3) != first


def test_a_spec_that_changed_begins_anew(build_loop: BuildLoop, tmp_path: Path):
    """In a folder that another run left: its checkpoints and good states are neither used nor in the way."""
    ran(build_loop, "folder", ppo={"rounds": 4})
    again = ran(build_loop, "folder", ppo={"actor_lr": 2e-3, "rounds": 2})
    alone = ran(build_loop, "alone", ppo={"actor_lr": 2e-3, "rounds": 2})
    assert all(torch.equal(t, alone.state.policy.tensors()[n]) for n, t in again.state.policy.tensors().items())
    assert [line["step"] for line in steps(again)] == list(range(1, 9))
    assert again.parts.good.steps() == alone.parts.good.steps()
    assert again.parts.checkpoints.steps() == alone.parts.checkpoints.steps()


def test_a_finished_run_has_nothing_left_to_do(build_loop: BuildLoop):
    loop = ran(build_loop)
    again = loop_of(loop.context.directory)
    again.run()
    assert all(torch.equal(t, loop.state.policy.tensors()[n]) for n, t in again.state.policy.tensors().items())
    assert len(steps(again)) == 12
    assert GUARDS.rules == []

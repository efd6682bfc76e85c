"""The faults that guards are there for: the right rule fires, the last good state comes back, training goes on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema.guards import GuardRule, Mitigation, default_rules
from tests.training.ppo.conftest import BuildLoop
from tests.training.ppo.test_loop import events, lines, steps
from tests.training.ppo.watching import HALVE, LIMIT, LONG, assert_sound, fired, guarded, watched
from tests.training.snapshots import changed_rows
from tests.training.stages import PPO, REPLAY, ROLLOUT, run_here, write_stage
from training.errors import ConfigError, GuardStop
from training.models.sampling import Sample, sample_responses
from training.ppo.loop import PPOLoop


def poison_round(loop: PPOLoop, bad: int, factor: float = 1e6, every: int = 1) -> None:
    """Fresh answers of one round (or each `every`-th of them) come with rewards times `factor`."""
    collect = loop.parts.rollouts.collect

    def collected(round_index: int) -> Any:
        answers = collect(round_index)
        if round_index == bad:
            for answer in answers[::every]:
                # Its size: whether the tiny reward model likes or loathes these answers is chance.
                object.__setattr__(answer, "score", abs(answer.score) * factor)
        return answers

    loop.parts.rollouts.collect = collected


def test_poisoned_rewards_are_rolled_back(build_loop: BuildLoop):
    rule = GuardRule(metric="reward_raw_mean", op=">", threshold=1_000, action="rollback", then=HALVE, name="poison")
    loop, watch = watched(build_loop, rule)
    object.__setattr__(loop.parts.maker.scale, "mean", 0.0)
    poison_round(loop, 2)
    loop.run()
    (event,) = events(loop, "rollback")
    assert (event["round"], event["step"], event["to_step"], event["rule"]) == (2, 9, 8, "poison")
    assert "reward_raw_mean" in event["sentence"]
    assert watch.seen == [8]
    assert loop.state.actor.lr_scale == loop.state.critic_engine.lr_scale == 0.5
    assert all(abs(e.score) < 1_000 for e in loop.state.pool.fresh), "poisoned answers stayed"
    assert {e.round for e in loop.state.pool.fresh} == {0, 1, 3}
    assert_sound(loop)


def test_rewards_beyond_every_number_do_not_end_the_run(build_loop: BuildLoop):
    """Unclipped, their squares are no float32: the round says so, its steps are not applied, the next one goes on."""
    ppo = LONG.model_copy(update={"reward_clip": None})
    loop, _ = watched(build_loop, ppo=ppo)
    poison_round(loop, 2, factor=1e30)
    loop.run()
    told = events(loop, "round")[2]
    assert "advantage_variance" in told["nonfinite"]
    assert told["advantage_variance"] is None
    assert events(loop, "step_not_applied")
    assert_sound(loop)


CLIPPED = [rule for rule in default_rules() if rule.metric == "reward_clip_frac"]
ALARM = "reward_clip_frac > baseline + 0.1"


def scaled(loop: PPOLoop, std: float) -> PPOLoop:
    """The judge's spread on held-out answers is `std`."""
    object.__setattr__(loop.parts.maker.scale, "std", std)
    return loop


@pytest.mark.parametrize("bad", [0, 2])
def test_poisoned_rewards_fire_a_rule_that_everybody_has(build_loop: BuildLoop, bad: int):
    """Scores beyond the clip, whatever their unit; from the very first round on."""
    loop, watch = watched(build_loop, *CLIPPED)
    scaled(loop, 100.0)  # the tiny reward model's own spread is next to nothing
    poison_round(loop, bad)
    loop.run()
    assert loop.parts.guards.baseline["reward_clip_frac"] == 0.0
    assert [(event["round"], event["rule"]) for event in events(loop, "rollback")] == [(bad, ALARM)]
    assert watch.seen == [4 * bad]
    assert_sound(loop)


def poison_store(loop: PPOLoop, rounds: set[int], known: bool) -> None:
    """Stored answers come with rewards times 1e6 in these rounds; `known`: in the list of all scores as well."""
    pool = loop.state.pool
    take, scores = pool.take, pool.scores

    def taken(indices: Any) -> Any:
        found = take(indices)
        for answer in found if loop.state.cursor.round in rounds else ():
            if answer.round < 0:
                object.__setattr__(answer, "score", (0.01 + abs(answer.score)) * 1e6)
        return found

    def told() -> Any:
        found = scores()
        if known and loop.state.cursor.round in rounds:
            found = np.concatenate([(0.01 + np.abs(found[: pool.num_stored])) * 1e6, found[pool.num_stored :]])
        return found

    pool.take, pool.scores = taken, told


@pytest.mark.parametrize(("fresh", "known"), [(2, True), (2, False), (0, True), (0, False)])
def test_damaged_scores_of_stored_answers_are_rolled_back(build_loop: BuildLoop, fresh: int, known: bool):
    """Whether they were damaged on the way into the round or are so in the store, beside fresh answers or without."""
    rollout, replay = ROLLOUT.model_copy(update={"n": fresh}), REPLAY.model_copy(update={"stored_share": 0.3})
    loop, watch = watched(build_loop, *CLIPPED, rollout=rollout, replay=replay)
    scaled(loop, 100.0)
    poison_store(loop, {2}, known)
    loop.run()
    assert [(event["round"], event["rule"]) for event in events(loop, "rollback")] == [(2, ALARM)]
    assert watch.seen == [8]


@pytest.mark.parametrize("fresh", [2, 0])
def test_a_store_that_was_damaged_before_the_night_is_no_excuse_for_itself(build_loop: BuildLoop, fresh: int):
    loop, _ = watched(build_loop, *CLIPPED, rollout=ROLLOUT.model_copy(update={"n": fresh}))
    scaled(loop, 100.0)
    poison_store(loop, set(range(9)), known=True)
    with pytest.raises(GuardStop, match="reward_clip_frac"):
        loop.run()
    assert loop.parts.guards.baseline["reward_clip_frac"] == 0.0


def test_poison_in_a_few_of_a_rounds_answers_fires_it_as_well(build_loop: BuildLoop):
    """Most of the round comes from the store, and one in two of tonight's answers is damaged."""
    mostly = REPLAY.model_copy(update={"stored_share": 0.8})
    loop, watch = watched(build_loop, *CLIPPED, guards=guarded(*CLIPPED, kl_probe_prompts=20), replay=mostly)
    scaled(loop, 100.0)
    poison_round(loop, 2, every=2)
    loop.run()
    assert [event["reward_clip_frac"] for event in events(loop, "round")] == [0.0, 0.0, 0.5, 0.0]
    assert [event["round"] for event in events(loop, "rollback")] == [2]
    assert watch.seen == [8]


@pytest.mark.parametrize("fresh", [2, 0])
def test_a_judge_without_a_scale_is_told_of_and_fails_no_night(build_loop: BuildLoop, fresh: int):
    """All its held-out scores were alike, so that every other one is beyond the clip: before the first step as well."""
    loop, watch = watched(build_loop, *CLIPPED, rollout=ROLLOUT.model_copy(update={"n": fresh}))
    scaled(loop, 1e-6)
    loop.run()
    assert loop.parts.guards.baseline["reward_clip_frac"] > 0.9
    assert not watch.seen
    assert set(fired(loop)) == {"reward_clip_frac > 0.1"}, "a person hears of it"
    assert loop.state.cursor.round == loop.ppo.rounds


def test_poison_beyond_what_a_poor_judge_clips_anyway(build_loop: BuildLoop):
    """Some of the incoming policy's answers are clipped already; a round in which all are stands out all the same."""
    patient = [rule.model_copy(update={"max_rollbacks": 9}) for rule in CLIPPED]
    loop, _ = watched(build_loop, *patient, guards=guarded(*patient, kl_probe_prompts=20))
    probe = loop.parts.prober.measure(loop.guards.kl_probe_prompts)
    held_out = np.abs(np.asarray(probe.scores) - loop.parts.maker.scale.mean)
    cut = float(np.quantile(held_out, 0.75))
    scaled(loop, cut / loop.ppo.reward_clip)
    poison_round(loop, 2)
    loop.run()
    begins = loop.parts.guards.baseline["reward_clip_frac"]
    assert begins == pytest.approx(np.mean(held_out > cut))
    assert 0 < begins < 0.5
    assert 2 in [event["round"] for event in events(loop, "rollback")]


def test_a_learning_rate_a_hundred_times_too_high_is_brought_down(build_loop: BuildLoop):
    far = GuardRule(
        metric="kl_ref", op=">", threshold=LIMIT, action="rollback", max_rollbacks=3,
        then=Mitigation(kind="reduce_lr", factor=0.02),
    )  # fmt: skip
    wild = LONG.model_copy(update={"actor_lr": 0.1, "select_best": True})
    loop, watch = watched(build_loop, far, ppo=wild)
    loop.run()
    assert 1 <= len(watch.seen) <= 3
    assert set(fired(loop)) == {f"kl_ref > {LIMIT}"}
    assert loop.state.actor.lr_scale <= 0.02
    assert_sound(loop)
    assert loop.state.best.probe["kl_ref"] < LIMIT
    assert loop.parts.prober.measure(6).kl_ref < LIMIT
    rates = [line["learning_rate"] for line in steps(loop) if line.get("learning_rate")]
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.1 * loop.state.actor.lr_scale)


def test_a_gradient_that_is_not_a_number_is_rolled_back(build_loop: BuildLoop):
    rules = [rule for rule in default_rules() if rule.op == "nonfinite"]
    loop, watch = watched(build_loop, *rules)
    parameter = next(p for name, p in loop.state.policy.parameters().items() if "lora_B" in name)
    parameter.requires_grad_(True).register_hook(
        lambda gradient: gradient * (math.nan if loop.state.cursor.step == 5 else 1.0)
    )
    loop.run()
    assert fired(loop) == ["grad_norm nonfinite"]
    assert [line["step"] for line in steps(loop) if line["applied"] == 0.0] == [6]
    assert [line["step"] for line in steps(loop) if "grad_norm" in line.get("nonfinite", [])] == [6]
    assert watch.seen == [4]
    assert loop.state.actor.lr_scale == 0.5
    assert_sound(loop)


def test_a_loss_that_is_not_a_number_is_rolled_back(build_loop: BuildLoop):
    loop, watch = watched(build_loop, *[rule for rule in default_rules() if rule.metric == "loss"])
    make = loop.parts.maker.make

    def spoilt(*arguments: Any) -> Any:
        batch, metrics = make(*arguments)
        if loop.state.cursor.round == 2:
            batch.advantages[0, 0] = math.nan
        return batch, metrics

    loop.parts.maker.make = spoilt
    loop.run()
    assert fired(loop) == ["loss nonfinite"]
    assert watch.seen == [8]
    assert_sound(loop)


def test_answers_that_collapse_are_rolled_back(build_loop: BuildLoop, monkeypatch: pytest.MonkeyPatch):
    """From one step on the policy's weights are such that every answer is one token long."""
    rules = [rule for rule in default_rules() if rule.metric == "response_length"]
    loop, watch = watched(build_loop, *rules)
    marked = next(p for name, p in loop.state.policy.parameters().items() if "lora_B" in name)
    step = loop.parts.updater.step

    def collapsing(*arguments: Any) -> Any:
        metrics = step(*arguments)
        if loop.state.cursor.step == 6:
            with torch.no_grad():
                marked.fill_(0.125)
        return metrics

    def sampled(*arguments: Any, **options: Any) -> list[Sample]:
        samples = sample_responses(*arguments, **options)
        silent = float(marked.detach().min()) > 0.1
        return [Sample(s.token_ids[:1], s.log_probs[:1], False) for s in samples] if silent else samples

    monkeypatch.setattr("training.ppo.probe.sample_responses", sampled)
    loop.parts.updater.step = collapsing
    loop.run()
    assert [event["step"] for event in events(loop, "rollback")] == [8]
    assert fired(loop) == ["response_length < 0.3"]
    assert watch.seen == [4]
    shortest = min(line["response_length"] for line in lines(loop) if "response_length" in line)
    assert shortest < 0.3 * loop.parts.guards.baseline["response_length"]
    last = [line["response_length"] for line in lines(loop) if "response_length" in line][-1]
    assert last > 0.3 * loop.parts.guards.baseline["response_length"]
    assert_sound(loop)


def test_the_usual_rule_on_stale_answers_rests_in_health_and_fires_when_their_writer_is_far(build_loop: BuildLoop):
    """Answers come back that this night's earlier policies wrote; then such as somebody quite different wrote."""
    (rule,) = [rule for rule in default_rules() if rule.metric == "kl_behavior"]
    longer = LONG.model_copy(update={"rounds": 6})
    replay = REPLAY.model_copy(update={"stored_share": 0.7})
    healthy, _ = watched(build_loop, rule, name="healthy", ppo=longer, replay=replay)
    healthy.run()
    seen = [event["kl_behavior"] for event in events(healthy, "round")]
    assert 0 < max(seen) < rule.threshold / 2
    assert fired(healthy) == []
    far, _ = watched(build_loop, rule, name="far", replay=replay)
    collect = far.parts.rollouts.collect
    far.parts.rollouts.collect = lambda index: [
        replace(answer, behavior_log_probs=answer.behavior_log_probs + np.float32(0.3)) for answer in collect(index)
    ]
    far.run()
    assert set(fired(far)) == {rule.label}


def test_every_firing_is_in_the_result(tmp_path, night, ppo_inputs):
    from tests.training.conftest import store_params

    rules = [GuardRule(metric="loss", op="<", threshold=1e9, patience=4, action="warn", name="seen")]
    params = store_params(night) | {"store": str(copied_store(night, tmp_path))}
    directory = write_stage(tmp_path / "ppo", "ppo", ppo_inputs, params, guards=guarded(*rules))
    result = run_here(directory, "ppo")
    assert result.metrics["guard_firings"] == 3
    assert [firing["step"] for firing in result.facts["guards"]] == [4, 8, 12]
    assert "rule 'seen'): warn" in result.facts["guards"][0]["sentence"]


def copied_store(night, tmp_path):
    import shutil

    return shutil.copytree(night / "store", tmp_path / "store")


def test_a_rule_on_nothing_is_refused_before_any_step(tmp_path, night, ppo_inputs):
    from tests.training.conftest import store_params

    rules = guarded(GuardRule(metric="kl", op=">", threshold=0.3))
    directory = write_stage(tmp_path / "ppo", "ppo", ppo_inputs, store_params(night), guards=rules)
    with pytest.raises(ConfigError, match="which this stage does not measure"):
        run_here(directory, "ppo")
    assert not (directory / "checkpoints").exists()


def test_a_multiple_of_a_drift_that_begins_at_nothing_ends_the_run_before_any_step(build_loop: BuildLoop):
    rule = GuardRule(metric="kl_ref", op=">", threshold=1.5, relative_to="baseline", action="stop")
    loop, _ = watched(build_loop, rule)
    with pytest.raises(ConfigError, match="'kl_ref' is 0 before the first step"):
        loop.run()
    assert loop.state.cursor.step == 0


def test_a_rule_on_perplexity_without_texts_to_read_is_refused_before_any_step(tmp_path, build_loop, ppo_inputs):
    """As with answers that nobody preferred or rewarded: the rule would never fire, and nobody would know."""
    bare = ppo_inputs["snapshot"]
    for split in ("train", "validation"):
        bare = changed_rows(split, bare, tmp_path / split, lambda rows: [row | {"chosen": None} for row in rows])
    ppo_inputs = ppo_inputs | {"snapshot": bare}
    rules = [rule for rule in default_rules() if rule.metric in ("perplexity", "kl_ref")]
    told = r"'perplexity > 1.2' watches 'perplexity', which this stage does not measure"
    with pytest.raises(ConfigError, match=told):
        build_loop(inputs=ppo_inputs, guards=guarded(*rules))
    build_loop("without", inputs=ppo_inputs, guards=guarded(*(rule for rule in rules if rule.metric == "kl_ref")))


def test_clipped_shares_by_hand():
    from training.ppo.shaping import RewardScale, clipped_share

    answers = [0.0, 4.9, 5.1, -70.0]
    scale = RewardScale(0.0, 2.0, 9)
    plain = PPO.model_copy(update={"normalize_reward": False, "reward_clip": 5.0})
    assert clipped_share(answers, plain, scale) == 0.5
    assert clipped_share(answers, plain.model_copy(update={"normalize_reward": True}), scale) == 0.25
    assert clipped_share(answers, plain.model_copy(update={"reward_clip": None}), scale) == 0.0
    assert clipped_share([], plain, scale) == 0.0
    assert np.isfinite(clipped_share(answers, PPO, RewardScale(0.0, 0.0, 9)))

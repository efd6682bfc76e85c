"""Guards at work: the right rule fires, the last good state comes back bit for bit, training goes on, to an end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema.guards import GuardRule, GuardsConfig, Mitigation, default_rules
from tests.training.ppo.conftest import BuildLoop
from tests.training.ppo.test_loop import events, lines, steps
from tests.training.stages import GUARDS, PPO, run_here, write_stage
from training.checkpoint import Checkpoint
from training.errors import ConfigError, GuardStop
from training.models.sampling import Sample, sample_responses
from training.ppo.loop import PPOLoop

LIMIT = 0.03  # nats a token: so small a model cannot go much further
LONG = PPO.model_copy(update={"rounds": 4, "select_best": False})
HALVE = Mitigation(kind="reduce_lr", factor=0.5)


def guarded(*rules: GuardRule, **changes: Any) -> GuardsConfig:
    return GUARDS.model_copy(update={"rules": list(rules)} | changes)


@dataclass
class Watch:
    """Compares the state with the last good one at each rollback, just before the next round."""

    loop: PPOLoop
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.skip = self.loop._skip_round
        self.loop._skip_round = self.compare

    def compare(self) -> None:
        state = self.loop.state
        good = self.loop.parts.good.at(state.cursor.good_step)
        assert_restored(state.tensors(), good)
        now = state.state()
        for name in ("kl", "best"):
            assert now[name] == good.state[name]
        for name in ("actor", "critic"):
            assert now[name]["steps_done"] == good.state[name]["steps_done"]
        assert now["cursor"]["applied"] == good.state["cursor"]["applied"]
        assert state.batch is None
        assert len(state.pool) <= state.sampler.capacity
        self.seen.append(good.step)
        self.skip()


def assert_restored(tensors: dict[str, torch.Tensor], good: Checkpoint) -> None:
    assert tensors.keys() == good.tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, good.tensors[name]), name


def watched(build_loop: BuildLoop, *rules: GuardRule, name: str = "ppo", **sections: Any) -> tuple[PPOLoop, Watch]:
    loop = build_loop(name, **{"ppo": LONG, "guards": guarded(*rules)} | sections)
    return loop, Watch(loop)


def fired(loop: PPOLoop) -> list[str]:
    return [event["rule"] for event in events(loop, "guard")]


def assert_sound(loop: PPOLoop) -> None:
    assert loop.state.cursor.round == loop.ppo.rounds, "training did not go on"
    assert loop.state.cursor.applied > 0
    assert all(torch.isfinite(t).all() for t in loop.state.policy.tensors().values())
    numbers = [line["step"] for line in steps(loop)]
    assert numbers == list(range(1, len(numbers) + 1)), "steps are counted on, never again"


def poison_round(loop: PPOLoop, bad: int, factor: float = 1e6) -> None:
    """Fresh answers of one round come with rewards times `factor`."""
    collect = loop.parts.rollouts.collect

    def collected(round_index: int) -> Any:
        answers = collect(round_index)
        if round_index == bad:
            for answer in answers:
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


def test_poisoned_rewards_fire_a_rule_that_everybody_has(build_loop: BuildLoop):
    """Scores beyond the clip, whatever their unit."""
    rules = [rule for rule in default_rules() if rule.metric == "reward_clip_frac"]
    loop, watch = watched(build_loop, *rules)
    object.__setattr__(loop.parts.maker.scale, "std", 100.0)  # the tiny reward model's own spread is next to nothing
    poison_round(loop, 2)
    loop.run()
    assert [event["round"] for event in events(loop, "rollback")] == [2]
    assert watch.seen == [8]
    assert_sound(loop)


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

    def sampled(*arguments: Any) -> list[Sample]:
        samples = sample_responses(*arguments)
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


def test_a_round_may_be_rolled_back_at_its_end(build_loop: BuildLoop):
    """The probe between rounds is the first to see it."""
    rule = GuardRule(metric="kl_ref", op=">", threshold=1e-9, action="rollback", then=HALVE, max_rollbacks=1)
    rare = guarded(rule, kl_probe_steps=1_000)
    loop, watch = watched(build_loop, guards=rare, ppo=LONG.model_copy(update={"rounds": 3}))
    kl_before = loop.state.kl.kl_coef
    with pytest.raises(GuardStop, match=r"rolled back 1 times and still: kl_ref = .*(.|\n)*lower ppo.actor_lr"):
        loop.run()
    (event,) = events(loop, "rollback")
    assert (event["round"], event["step"], event["to_step"]) == (1, 8, 4)
    assert watch.seen == [4]
    assert loop.state.kl.kl_coef == kl_before


def test_after_its_last_rollback_a_rule_ends_the_run(build_loop: BuildLoop):
    always = GuardRule(metric="approx_kl", op="<", threshold=1e9, action="rollback", max_rollbacks=2, then=HALVE)
    loop, watch = watched(build_loop, always)
    with pytest.raises(GuardStop, match=r"rolled back 2 times and still: approx_kl"):
        loop.run()
    assert [event["round"] for event in events(loop, "rollback")] == [1, 2]
    assert watch.seen == [4, 5]
    assert loop.parts.guards.rollbacks == [3]
    assert loop.state.actor.lr_scale == 0.25
    assert not (loop.context.directory / "policy").exists()


def test_the_good_state_of_a_skipped_round_is_the_one_before(build_loop: BuildLoop):
    """Rolling back twice in a row lands on the same weights: nothing of a given-up round is kept."""
    always = GuardRule(metric="approx_kl", op="<", threshold=1e9, action="rollback", max_rollbacks=2, then=HALVE)
    loop, _ = watched(build_loop, always)
    start = loop.state.policy.tensors()
    with pytest.raises(GuardStop):
        loop.run()
    good = loop.parts.good.at(loop.state.cursor.good_step)
    for name, tensor in start.items():
        assert torch.equal(good.tensors[f"policy/{name}"], tensor), name


def test_stop_stops(build_loop: BuildLoop):
    rule = GuardRule(metric="value_loss", op=">=", threshold=0.0, action="stop", name="enough")
    loop, watch = watched(build_loop, rule)
    with pytest.raises(GuardStop, match=r"stopped by a guard: value_loss = .*'enough'"):
        loop.run()
    assert fired(loop) == ["enough"]
    assert watch.seen == []
    assert loop.state.cursor.step == 1


def history(loop: PPOLoop) -> list[dict[str, Any]]:
    timed = {"time", "tokens_per_second"}
    return [{k: v for k, v in line.items() if k not in timed} for line in lines(loop)]


def test_a_warning_changes_nothing_but_the_log(build_loop: BuildLoop):
    warned, _ = watched(build_loop, GuardRule(metric="loss", op="<", threshold=1e9, action="warn"), name="warned")
    free, _ = watched(build_loop, name="free")
    warned.run()
    free.run()
    assert len(events(warned, "guard")) == len(steps(free))
    assert [line for line in history(warned) if line.get("event") != "guard"] == history(free)
    assert all(torch.equal(t, free.state.policy.tensors()[n]) for n, t in warned.state.policy.tensors().items())


def test_reduce_lr_multiplies_down_to_its_floor(build_loop: BuildLoop):
    rule = GuardRule(
        metric="policy_loss", op="<", threshold=1e9, action="reduce_lr",
        then=Mitigation(kind="reduce_lr", factor=0.1, floor=2e-5),
    )  # fmt: skip
    loop, watch = watched(build_loop, rule)
    loop.run()
    rates = [line["learning_rate"] for line in steps(loop) if line.get("learning_rate")]
    assert rates[:4] == pytest.approx([1e-3, 1e-4, 2e-5, 2e-5])
    assert rates[-1] == pytest.approx(2e-5)
    critic = [line["critic_learning_rate"] for line in steps(loop)]
    assert critic[0] == pytest.approx(1e-2)
    assert critic[-1] == pytest.approx(1e-2 * 2e-5 / 1e-3)
    assert watch.seen == []


def test_a_floor_above_the_rate_never_raises_it(build_loop: BuildLoop):
    rule = GuardRule(
        metric="policy_loss", op="<", threshold=1e9, action="reduce_lr", then=Mitigation(kind="reduce_lr", floor=0.5)
    )
    loop, _ = watched(build_loop, rule, ppo=LONG.model_copy(update={"rounds": 2}))
    loop.run()
    assert loop.state.actor.lr_scale == loop.state.critic_engine.lr_scale == 1.0


def test_reduce_clip_lowers_the_clip_and_never_raises_it(build_loop: BuildLoop):
    def rule(to: float) -> GuardRule:
        lower = Mitigation(kind="reduce_clip", to=to)
        return GuardRule(metric="policy_loss", op="<", threshold=1e9, action="reduce_clip", then=lower)

    ppo = LONG.model_copy(update={"clip_ratio": 0.2, "clip_ratio_high": 0.3, "rounds": 2})
    loop, _ = watched(build_loop, rule(0.1), ppo=ppo)
    used = []
    step = loop.parts.updater.step
    loop.parts.updater.step = lambda b, d, s: (used.append((s.clip_ratio_low, s.clip_ratio_high)), step(b, d, s))[1]
    loop.run()
    assert used == [(0.2, 0.3)] * 5 + [(0.1, 0.1)] * 3
    wide, _ = watched(build_loop, rule(0.9), name="wide", ppo=ppo)
    wide.run()
    assert (wide.state.cursor.clip_ratio_low, wide.state.cursor.clip_ratio_high) == (0.2, 0.3)


def later(patience: int, action: str, then: Mitigation, name: str | None = None) -> GuardRule:
    """A rule that fires at the `patience`-th step of the policy: 5 is the first of round 2, 6 the second."""
    return GuardRule(
        metric="approx_kl",
        op="<",
        threshold=1e9,
        patience=patience,
        action=action,
        then=then,
        max_rollbacks=9,
        name=name,
    )


def test_a_mitigation_outlives_a_rollback_in_the_same_round(build_loop: BuildLoop):
    """The state that comes back is older than the lesson."""
    rules = [
        later(5, "reduce_clip", Mitigation(kind="reduce_clip", to=0.1)),
        later(5, "reduce_lr", Mitigation(kind="reduce_lr", factor=0.1)),
        later(6, "rollback", HALVE),
    ]
    loop, watch = watched(build_loop, *rules, ppo=LONG.model_copy(update={"rounds": 3}))
    loop.run()
    assert watch.seen == [8]
    assert (loop.state.cursor.clip_ratio_low, loop.state.cursor.clip_ratio_high) == (0.1, 0.1)
    assert loop.state.actor.lr_scale == pytest.approx(0.05)
    assert loop.state.critic_engine.lr_scale == pytest.approx(0.05)


def test_after_a_rollback_no_rule_remembers_the_way_there(build_loop: BuildLoop):
    """Its seventh breach would come with the next step, but six of them were undone."""
    rules = [later(6, "rollback", HALVE), later(7, "warn", HALVE, name="late")]
    loop, watch = watched(build_loop, *rules, ppo=LONG.model_copy(update={"rounds": 5}))
    loop.run()
    assert watch.seen == [8, 14]
    assert "late" not in fired(loop)


@pytest.mark.parametrize("kind", ["reduce_lr", "reduce_clip", "none"])
def test_the_mitigation_of_a_rollback_is_the_rules(build_loop: BuildLoop, kind: str):
    rule = GuardRule(
        metric="approx_kl", op="<", threshold=1e9, patience=6, action="rollback", then=Mitigation(kind=kind, to=0.12)
    )
    loop, _ = watched(build_loop, rule)
    loop.run()
    changed = {
        "reduce_lr": loop.state.actor.lr_scale == 0.5, "reduce_clip": loop.state.cursor.clip_ratio_low == 0.12,
        "none": False,
    }  # fmt: skip
    untouched = (loop.state.actor.lr_scale, loop.state.cursor.clip_ratio_low) == (1.0, 0.2)
    assert changed[kind] or untouched
    assert changed[kind] == (kind != "none")
    assert [event["kind"] for event in events(loop, "mitigation")] == [kind]


def test_two_rules_at_once_roll_back_once(build_loop: BuildLoop):
    rules = [
        GuardRule(metric=metric, op="<", threshold=1e9, patience=6, action="rollback", then=HALVE, name=metric)
        for metric in ("approx_kl", "policy_loss")
    ]
    loop, watch = watched(build_loop, *rules)
    loop.run()
    assert fired(loop) == ["approx_kl", "policy_loss"]
    assert len(watch.seen) == 1
    assert loop.parts.guards.rollbacks == [1, 0]


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


def test_clipped_shares_by_hand():
    from tests.training.ppo.conftest import experience
    from training.ppo.shaping import RewardScale, clipped_share

    answers = [experience(i, score=s) for i, s in enumerate([0.0, 4.9, 5.1, -70.0])]
    scale = RewardScale(0.0, 2.0, 9)
    plain = PPO.model_copy(update={"normalize_reward": False, "reward_clip": 5.0})
    assert clipped_share(answers, plain, scale) == 0.5
    assert clipped_share(answers, plain.model_copy(update={"normalize_reward": True}), scale) == 0.25
    assert clipped_share(answers, plain.model_copy(update={"reward_clip": None}), scale) == 0.0
    assert np.isfinite(clipped_share(answers, PPO, RewardScale(0.0, 0.0, 9)))

"""What each action of a guard does, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.schema.guards import GuardRule, Mitigation
from tests.training.ppo.conftest import BuildLoop
from tests.training.ppo.test_loop import events, lines, steps
from tests.training.ppo.watching import HALVE, LONG, assert_sound, fired, guarded, later, watched
from training.errors import GuardStop
from training.ppo.loop import PPOLoop


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


def test_a_good_state_that_was_tampered_with_is_passed_over_for_the_one_before(build_loop: BuildLoop):
    rule = later(6, "rollback", HALVE)
    loop = build_loop(ppo=LONG, guards=guarded(rule))
    act = loop.reactions.act
    landed: list[tuple[int, dict[str, torch.Tensor]]] = []

    def tampered(firings: Any, round_is_over: bool = False) -> None:
        if firings:
            assert loop.parts.good.steps() == [4, 8]
            file = loop.parts.good.folder / "step_00000008" / "tensors.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        try:
            act(firings, round_is_over)
        finally:
            if firings:
                landed.append((loop.state.cursor.applied, loop.state.policy.tensors()))

    loop.reactions.act = tampered
    before = loop.state.policy.tensors()
    loop.run()
    (event,) = events(loop, "rollback")
    assert (event["step"], event["to_step"]) == (10, 4)
    (refused,) = events(loop, "checkpoint_refused")
    assert "step_00000008" in refused["reason"]
    applied, restored = landed[0]
    assert applied == 0, "only the critic had learnt by step 4"
    assert all(torch.equal(tensor, before[name]) for name, tensor in restored.items())
    assert_sound(loop)


def test_with_no_good_state_left_the_run_ends(build_loop: BuildLoop):
    loop = build_loop(ppo=LONG, guards=guarded(later(6, "rollback", HALVE)))
    roll_back = loop.reactions._roll_back

    def spoilt(*arguments: Any) -> None:
        for file in loop.parts.good.folder.rglob("state.json"):
            file.write_text("{}")
        roll_back(*arguments)

    loop.reactions._roll_back = spoilt
    with pytest.raises(GuardStop, match=r"no good state in .*good_states is whole"):
        loop.run()
    assert len(events(loop, "checkpoint_refused")) == 2


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

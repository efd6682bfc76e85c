"""Faults in a real run of PPO on the quickstart's models, under the rules that everybody has.

Each fires the right rule, the last good state comes back bit for bit, the mitigation is applied, training goes on, and
the policy that is handed on is no worse than the reference by the gold reward, which nothing in training sees.

One more run has no fault. "No worse than the reference" would be passed by a run that learned nothing, too: what a run
of this length gains undisturbed is logged beside the others, and says how much of it a fault has cost.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema.guards import GuardsConfig, default_rules
from tests.slow.conftest import QuickstartNight, sections_of
from tests.training.ppo.conftest import loop_of
from tests.training.ppo.test_loop import events
from tests.training.ppo.watching import Watch, assert_sound, fired
from tests.training.stages import write_stage
from training.examples import encode_prompts, read_split
from training.models.layout import Group, build_layout
from training.models.network import Network
from training.models.sampling import SamplingSettings, sample_responses
from training.objectives import aggregate
from training.ppo.loop import PPOLoop
from training.scoring import FunctionScorer, Question
from training.seeding import torch_generator

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = 5
BAD_ROUND = 3
SHORT = {"rounds": ROUNDS, "train_batch_size": 192, "ppo_epochs": 2}
"""Six steps a round, so that the faults below name their step."""
Build = Callable[..., tuple[PPOLoop, Watch]]


@pytest.fixture
def build(quickstart: QuickstartNight, tmp_path) -> Build:
    """`build(actor_lr=...)`: a short PPO run of the quickstart, watched, under the default rules."""

    def make(**ppo: Any) -> tuple[PPOLoop, Watch]:
        config = quickstart.config
        sections = sections_of(config) | {
            "ppo": config.ppo.model_copy(update=SHORT | ppo),
            "guards": GuardsConfig(rules=default_rules(), kl_probe_prompts=64, perplexity_steps=10_000),
        }
        store = shutil.copytree(quickstart.home / "store", tmp_path / "store")
        inputs = {role: quickstart.inputs[role] for role in ("snapshot", "reference", "reward_model", "view")}
        params = {"store": str(store), "night_index": 0}
        loop = loop_of(write_stage(tmp_path / "ppo", "ppo", inputs, params, config.seed, **sections))
        return loop, Watch(loop)

    return make


def gold(loop: PPOLoop, network: Network) -> np.ndarray:
    """Gold reward of one answer to each evaluation prompt, the same uniform numbers for every network."""
    actors = loop.parts.updater.actors
    prompts = encode_prompts(read_split(loop.context.input("snapshot"), "evaluation"), actors.encoder, 256)
    settings = SamplingSettings(32, batch_size=256)
    samples = sample_responses(network, [p.token_ids for p in prompts], settings, torch_generator(1, "test/gold"))
    scorer = FunctionScorer("quickstart", (), actors.encoder.tokenizer)
    return scorer.scores([Question(p, s.token_ids) for p, s in zip(prompts, samples, strict=True)])


def assert_no_worse(loop: PPOLoop, watch: Watch, name: str) -> None:
    """What is handed on holds against the reference, by gold and by what the loop saw itself; both are logged."""
    actors = loop.parts.updater.actors
    difference = gold(loop, actors.policy) - gold(loop, actors.reference)
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    logger.info(
        "%s: gold %+.3f +- %.3f over the reference, fired %s, rolled back %d time(s), rate x %g, best round %d, "
        "kl_ref %.3f", name, difference.mean(), 1.96 * error, sorted(set(fired(loop))), len(watch.seen),
        loop.state.actor.lr_scale, loop.state.best.round, loop.state.best.probe["kl_ref"],
    )  # fmt: skip
    assert difference.mean() + 1.96 * error >= 0, "worse than the reference"
    best, baseline = loop.state.best.probe, loop.parts.guards.baseline
    assert best["heldout_reward"] >= baseline["heldout_reward"]
    assert best["kl_ref"] <= 0.3


def assert_recovered(loop: PPOLoop, watch: Watch, rule: str, name: str) -> None:
    """The rule fired, its rollback was exact (`Watch` compared), the run went on and ended no worse than it began."""
    assert rule in fired(loop)
    assert watch.seen, "nothing was rolled back"
    assert any(event["rule"] in fired(loop) for event in events(loop, "rollback"))
    assert events(loop, "mitigation")
    assert loop.state.actor.lr_scale < 1.0
    assert_sound(loop)
    assert_no_worse(loop, watch, name)


def test_no_fault(build: Build) -> None:
    """The control: nothing is rolled back, and the policy learns."""
    loop, watch = build()
    loop.run()
    assert_sound(loop)
    assert not watch.seen
    assert not events(loop, "mitigation")
    assert loop.state.best.round > 0, "nothing was learned"
    assert_no_worse(loop, watch, "no fault")


def test_a_learning_rate_a_hundred_times_too_high(build: Build, quickstart: QuickstartNight) -> None:
    loop, watch = build(actor_lr=100 * quickstart.config.ppo.actor_lr)
    loop.run()
    assert_recovered(loop, watch, "kl_ref > 0.3", "rate x 100")


def test_rewards_a_million_times_too_large(build: Build) -> None:
    loop, watch = build()
    collect = loop.parts.rollouts.collect

    def poisoned(round_index: int) -> Any:
        answers = collect(round_index)
        for answer in answers if round_index == BAD_ROUND else ():
            object.__setattr__(answer, "score", answer.score * 1e6)
        return answers

    loop.parts.rollouts.collect = poisoned
    loop.run()
    assert [event["round"] for event in events(loop, "rollback")] == [BAD_ROUND]
    assert all(abs(answer.score) < 1e3 for answer in loop.state.pool.fresh), "poisoned answers stayed"
    assert_recovered(loop, watch, "reward_clip_frac > baseline + 0.1", "reward x 1e6")


def test_a_gradient_that_is_not_a_number(build: Build) -> None:
    loop, watch = build()
    parameter = next(iter(loop.state.policy.parameters().values()))
    bad = {BAD_ROUND * 6 + 2}  # 6 steps a round
    parameter.requires_grad_(True).register_hook(lambda g: g * (math.nan if loop.state.cursor.step in bad else 1.0))
    loop.run()
    assert [event["step"] for event in events(loop, "step_not_applied")] == [BAD_ROUND * 6 + 3]
    assert_recovered(loop, watch, "grad_norm nonfinite", "NaN gradient")


def test_answers_that_collapse(build: Build) -> None:
    """One step of the bad round is followed by training towards answers that end before they begin."""
    loop, watch = build()
    step, actors = loop.parts.updater.step, loop.parts.updater.actors
    end = actors.encoder.tokenizer.eos_token_id

    def collapsing(*arguments: Any) -> Any:
        metrics = step(*arguments)
        if loop.state.cursor.step == BAD_ROUND * 6 + 5:  # the round's last one
            groups = [Group(prompt.token_ids, ((end,),)) for prompt in loop.parts.prober.prompts[:64]]
            layout = build_layout(groups, "padded", end)
            adapter = torch.optim.Adam(actors.policy.parameters().values(), lr=3e-3)
            for _ in range(30):
                adapter.zero_grad()
                aggregate(-actors.policy.log_probs(layout), layout.response_mask, "token-mean").backward()
                adapter.step()
            adapter.zero_grad()
        return metrics

    loop.parts.updater.step = collapsing
    loop.run()
    assert [event["round"] for event in events(loop, "rollback")] == [BAD_ROUND]
    assert_recovered(loop, watch, "response_length < 0.3", "answers collapse")

"""Who reads what in a PPO run, and that what is written answers like what was trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.schema.base import Section
from tests.training.conftest import store_params
from tests.training.stages import MODELS, PPO, write_stage
from training.context import StageContext
from training.contract import METRICS, file_ref, read_spec
from training.errors import ModelFolderError, StageError
from training.models.backbone import Backbone
from training.models.layout import Group, build_layout
from training.models.network import Network
from training.ppo import actors as module
from training.ppo.actors import Actors, build_actors, build_engines, save_policy
from training.recorder import Recorder
from training.world import World

LAYOUT = build_layout([Group((1, 5, 9), ((7, 8, 2),))], "padded", 0)
FULL = PPO.model_copy(update={"lora_rank": 0})
Build = Callable[..., tuple[Actors, StageContext]]


@pytest.fixture
def build(tmp_path: Path, night: Path, ppo_inputs: dict[str, Path]) -> Build:
    def make(inputs: dict[str, Path] | None = None, **sections: Section) -> tuple[Actors, StageContext]:
        given = {"ppo": PPO, "models": MODELS} | sections
        directory = write_stage(tmp_path / "ppo", "ppo", ppo_inputs | (inputs or {}), store_params(night), **given)
        context = StageContext(directory, read_spec(directory), Recorder(directory / METRICS))
        return build_actors(context, given["models"], given["ppo"]), context

    return make


def stir(network: Network, scale: float = 0.1) -> None:
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters().values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=draws))


@torch.no_grad()
def log_probs(network: Network) -> torch.Tensor:
    return network.log_probs(LAYOUT)


def test_with_lora_all_three_share_one_backbone(build: Build):
    actors, _ = build()
    assert actors.policy.backbone is actors.critic.backbone is actors.reference.backbone
    assert actors.reference.adapter is None
    assert torch.equal(log_probs(actors.policy), log_probs(actors.reference))


def test_with_lora_the_critic_may_have_a_backbone_of_its_own(build: Build):
    actors, _ = build(models=MODELS.model_copy(update={"share_backbone": "never"}))
    assert actors.policy.backbone is actors.reference.backbone
    assert actors.critic.backbone is not actors.policy.backbone


def test_without_lora_each_has_its_own(build: Build):
    actors, _ = build(ppo=FULL)
    assert len({id(n.backbone) for n in (actors.policy, actors.critic, actors.reference)}) == 3
    assert torch.equal(log_probs(actors.policy), log_probs(actors.reference))
    assert actors.reference.parameters() == {}


@pytest.mark.parametrize("ppo", [PPO, FULL], ids=["lora", "full"])
def test_training_one_leaves_the_others(build: Build, ppo):
    actors, _ = build(ppo=ppo)
    reference, values = log_probs(actors.reference), actors.critic.values(LAYOUT).detach()
    stir(actors.policy)
    assert not torch.allclose(log_probs(actors.policy), reference, atol=1e-3)
    assert torch.equal(log_probs(actors.reference), reference)
    assert torch.equal(actors.critic.values(LAYOUT).detach(), values)
    policy = log_probs(actors.policy)
    stir(actors.critic)
    assert not torch.equal(actors.critic.values(LAYOUT).detach(), values)
    assert torch.equal(log_probs(actors.policy), policy)
    shared = set(map(id, actors.policy.parameters().values())) & set(map(id, actors.critic.parameters().values()))
    assert not shared


def test_the_critic_begins_by_expecting_nothing(build: Build):
    actors, _ = build()
    assert not actors.critic.values(LAYOUT).any()


def test_the_critics_rank_is_its_own(build: Build):
    actors, _ = build(ppo=PPO.model_copy(update={"critic_lora_rank": 2}))
    for network, rank in ((actors.policy, 4), (actors.critic, 2)):
        assert {p.shape[0] for name, p in network.parameters().items() if "lora_A" in name} == {rank}


@pytest.mark.parametrize("ppo", [PPO, FULL], ids=["lora", "full"])
def test_gradient_checkpointing_reaches_what_is_trained(build: Build, ppo):
    actors, _ = build(ppo=ppo, models=MODELS.model_copy(update={"gradient_checkpointing": True}))
    calls = [0]
    layer = actors.policy.backbone.base.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    actors.policy.log_probs(LAYOUT).sum().backward()
    assert calls[0] == 2
    if ppo is FULL:
        assert not actors.reference.backbone.base.is_gradient_checkpointing


def test_a_warm_start_reads_the_champions_adapter(build: Build, tmp_path: Path):
    first, _ = build()
    stir(first.policy)
    first.policy.backbone.save_adapter("policy", tmp_path / "champion")
    second, _ = build({"adapter": tmp_path / "champion"})
    assert torch.equal(log_probs(second.policy), log_probs(first.policy))
    assert torch.equal(log_probs(second.reference), log_probs(first.reference))


def test_a_warm_start_without_lora_reads_the_champions_weights(build: Build, tmp_path: Path):
    first, _ = build(ppo=FULL)
    stir(first.policy, 0.01)
    first.policy.backbone.save(tmp_path / "champion")
    second, _ = build({"policy": tmp_path / "champion"}, ppo=FULL)
    assert torch.equal(log_probs(second.policy), log_probs(first.policy))
    assert torch.equal(log_probs(second.reference), log_probs(first.reference))


def test_schedules_are_sized_by_real_steps(build: Build):
    sizes = {"rounds": 5, "critic_warmup_rounds": 2, "train_batch_size": 17, "ppo_mini_batch_size": 8}
    ppo = PPO.model_copy(update=sizes)
    actors, _ = build(ppo=ppo)
    actor, critic = build_engines(actors, ppo, World())
    assert (actor.settings.total_steps, critic.settings.total_steps) == (3 * 2 * 3, 5 * 2 * 3)
    assert (actor.settings.learning_rate, critic.settings.learning_rate) == (ppo.actor_lr, ppo.critic_lr)


@pytest.mark.parametrize("ppo", [PPO, FULL], ids=["lora", "full"])
def test_what_is_written_answers_like_what_was_trained(build: Build, ppo):
    actors, context = build(ppo=ppo)
    stir(actors.policy, 0.05)
    expected, reference = log_probs(actors.policy), log_probs(actors.reference)
    prompt = actors.encoder.prompt(
        {"prompt": [{"role": "user", "content": "What is 2 plus 3?"}], "prompt_id": "p", "source": "", "category": ""}
    )
    outputs = save_policy(actors, context, prompt)
    assert set(outputs) == ({"policy", "adapter"} if ppo is PPO else {"policy"})
    written = Network(Backbone.load(outputs["policy"], device=actors.device))
    assert float((log_probs(written) - expected).abs().max()) < 1e-4
    assert torch.equal(log_probs(actors.policy), expected), "saving moved the policy in memory"
    assert torch.equal(log_probs(actors.reference), reference)
    if ppo is PPO:
        again = Backbone.load(context.input("reference"), device=actors.device)
        again.load_adapter("x", outputs["adapter"])
        assert torch.equal(log_probs(Network(again, "x")), expected)
    first = {name: file_ref(path).sha256 for name, path in outputs.items()}
    (outputs["policy"] / "stale.txt").write_text("of a run before")
    second = save_policy(actors, context, prompt)
    assert {name: file_ref(path).sha256 for name, path in second.items()} == first


def test_a_policy_that_was_written_wrong_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch):
    """Merged weights equal to the base's are a bug that others have shipped."""
    actors, context = build()
    stir(actors.policy)
    prompt = actors.encoder.prompt(
        {"prompt": [{"role": "user", "content": "What is 2 plus 3?"}], "prompt_id": "p", "source": "", "category": ""}
    )
    monkeypatch.setattr(module.Backbone, "merge_and_save", lambda self, adapter, folder: shutil.copytree(
        context.input("reference"), folder
    ))  # fmt: skip
    with pytest.raises(StageError, match=r"policy: the saved policy's log-probs differ"):
        save_policy(actors, context, prompt)


def test_an_adapter_of_another_model_is_refused(build: Build, tmp_path: Path):
    first, _ = build()
    first.policy.backbone.save_adapter("policy", tmp_path / "champion")
    (tmp_path / "champion" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"adapter_model.safetensors: missing"):
        build({"adapter": tmp_path / "champion"})

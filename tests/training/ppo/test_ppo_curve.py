"""Ten seeded steps of offline PPO, pinned. Texts, weights and reward are made here, so that no other change moves them.

What may move them on purpose: an objective, the order of draws, the shaping of rewards. Then look at the new curve, and
write it down: the failing assertion shows it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.schema.models import ModelsConfig
from configs.schema.ppo import PPOConfig, ReplayConfig, RolloutConfig
from configs.schema.supervised import RewardConfig
from tests.training.ppo.conftest import loop_of
from tests.training.stages import GUARDS, run_here, write_snapshot, write_stage
from training.base import build_quickstart_model
from training.contract import METRICS
from training.data.schema import Message, Row
from training.models.backbone import Backbone
from training.recorder import read_lines

NAMES = ("policy_loss", "value_loss", "approx_kl", "entropy", "kl_ref_offpolicy", "grad_norm", "critic_grad_norm")
MODELS = ModelsConfig(
    base="quickstart", quickstart_hidden_size=32, quickstart_layers=2, max_prompt_length=24, max_response_length=16,
    dtype="float32",
)  # fmt: skip
PPO = PPOConfig(
    rounds=3, critic_warmup_rounds=0, train_batch_size=16, ppo_mini_batch_size=4, ppo_epochs=1, actor_lr=2e-3,
    critic_lr=5e-3, lora_rank=4, lora_alpha=8, selection_prompts=4, max_approx_kl=None, entropy_coeff=0.01,
    use_kl_loss=True, kl_loss_coef=0.05, ppo_max_token_len=160, lr_scheduler="linear", warmup_ratio=0.2,
)  # fmt: skip
REPLAY = ReplayConfig(refresh_steps=3, filter="power")
LETTERS = "tests.training.ppo.letters:letters"
REWARD = RewardConfig(kind="function", function=LETTERS, allowed_functions=[LETTERS])

CURVE = [
    [-0.227117, 5.751287, 0.000000, 4.490232, 0.000000, 0.241386, 6.749976],
    [0.483266, 3.168030, -0.001171, 4.509747, 0.000006, 0.285866, 3.991980],
    [-0.459609, 6.125702, -0.000693, 4.532326, 0.000062, 0.273353, 7.262935],
    [0.204817, 3.389515, 0.006694, 4.563841, 0.000123, 0.145665, 5.139652],
    [0.387339, 1.783474, 0.000000, 4.687944, 0.000242, 0.196199, 2.955718],
    [-0.185905, 3.017447, -0.003639, 4.599449, 0.000981, 0.123448, 4.289075],
    [0.150328, 1.864667, 0.003092, 4.671812, 0.000700, 0.108626, 3.498501],
    [-0.101130, 2.770792, -0.019032, 4.623585, 0.002806, 0.111864, 4.733897],
    [0.306275, 2.446293, 0.000000, 4.561370, 0.002261, 0.181967, 5.111216],
    [-0.018974, 3.697677, -0.001573, 4.604159, 0.002783, 0.193785, 6.790547],
]


def rows() -> list[Row]:
    places = ["the sea", "a green tree", "no one", "every hill", "a far town", "my bed"]
    things = ["sings", "sleeps", "is cold", "burns"]
    return [
        Row(
            prompt=(Message(role="user", content=f"Where is {number}?"),),
            chosen=f"{place} {thing}", rejected=f"{thing}, {place}",
        )
        for number, (place, thing) in enumerate((p, t) for p in places for t in things)
    ]  # fmt: skip


@pytest.fixture
def curve(tmp_path: Path) -> list[dict[str, float]]:
    snapshot = write_snapshot(tmp_path / "snapshot", rows(), {"train": 18, "validation": 4, "evaluation": 2})
    texts = [text for row in rows() for text in row.answers()] + ["User: Where is 1?\nAssistant:"]
    build_quickstart_model(texts, MODELS, 1, tmp_path / "base")
    backbone = Backbone.load(tmp_path / "base", device=torch.device("cpu"))
    with torch.no_grad():
        backbone.base.get_input_embeddings().weight.mul_(8.0)  # an untrained model is too flat to have a curve
    backbone.save(tmp_path / "reference")
    inputs, params = {"snapshot": snapshot, "reference": tmp_path / "reference"}, {"store": str(tmp_path / "store")}
    sections = {"models": MODELS, "reward": REWARD, "replay": REPLAY, "rollout": RolloutConfig(n=0)}
    annotated = run_here(write_stage(tmp_path / "annotate", "annotate", inputs, params, **sections), "annotate")
    inputs["view"] = Path(annotated.output("view").path)
    directory = write_stage(tmp_path / "ppo", "ppo", inputs, params, ppo=PPO, guards=GUARDS, **sections)
    loop_of(directory).run()
    return [line for line in read_lines(directory / METRICS) if "value_loss" in line][:10]


def test_ten_steps_are_the_ten_steps_of_before(curve: list[dict[str, float]]):
    found = [[line[name] for name in NAMES] for line in curve]
    shown = "\n".join(f"    [{', '.join(f'{value:.6f}' for value in row)}]," for row in found)
    assert len(found) == len(CURVE), f"CURVE = [\n{shown}\n]"
    for step, (row, pinned) in enumerate(zip(found, CURVE, strict=True), start=1):
        for name, value, expected in zip(NAMES, row, pinned, strict=True):
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-4), f"step {step}, {name}; CURVE = [\n{shown}\n]"

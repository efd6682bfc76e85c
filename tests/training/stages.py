"""Tiny stages for tests: a snapshot of pairs on sums, settings that run in seconds, a spec and a run of it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.schema.base import Section
from configs.schema.evaluation import EvaluationConfig
from configs.schema.guards import GuardsConfig
from configs.schema.models import ModelsConfig
from configs.schema.ppo import PPOConfig, ReplayConfig, RolloutConfig
from configs.schema.supervised import DistillConfig, RewardConfig, SFTConfig
from training.__main__ import STAGES
from training.contract import StageResult, StageSpec, file_ref, write_spec
from training.data.schema import ROW_SCHEMA, Message, Row
from training.process import run_stage

ROOT = Path(__file__).parents[2]
SEED = 7
SPLITS = {"train": 84, "validation": 20, "evaluation": 16}

MODELS = ModelsConfig(
    base="quickstart", quickstart_hidden_size=32, quickstart_layers=2, student_layers=1, max_prompt_length=32,
    max_response_length=14, dtype="float32",
)  # fmt: skip
SFT = SFTConfig(epochs=2, batch_size=24, learning_rate=1e-2, checkpoint_every=2, eval_every=2)
REWARD = RewardConfig(
    epochs=2, batch_size=24, learning_rate=3e-3, ensemble_size=2, ensemble_aggregate="mean_minus_std",
    checkpoint_every=2, eval_every=2, collapse_loss_gap=-1.0,
)  # fmt: skip
DISTILL = DistillConfig(
    epochs=2, batch_size=24, learning_rate=1e-2, lora_rank=4, lora_alpha=8, checkpoint_every=2, eval_every=2,
    policy_pairs=8, max_student_teacher_kl=None, min_accuracy_retained=None, collapse_loss_gap=-1.0,
)  # fmt: skip
ROLLOUT = RolloutConfig(n=2, prompts_per_round=6)
REPLAY = ReplayConfig(refresh_steps=3)
PPO = PPOConfig(
    rounds=3, critic_warmup_rounds=1, train_batch_size=16, ppo_mini_batch_size=8, ppo_epochs=2, actor_lr=1e-3,
    critic_lr=1e-2, lora_rank=4, lora_alpha=8, checkpoint_every=4, selection_prompts=6, max_approx_kl=None,
)  # fmt: skip
GUARDS = GuardsConfig(kl_probe_prompts=4, kl_probe_steps=3, perplexity_steps=4, perplexity_rows=8, rules=[])
EVALUATION = EvaluationConfig(prompts=16, perplexity_rows=16, bootstrap_samples=200, gold_function="quickstart")

SECTIONS: dict[str, dict[str, Section]] = {
    "base": {"models": MODELS},
    "sft": {"models": MODELS, "sft": SFT},
    "reward": {"models": MODELS, "reward": REWARD},
    "distill": {"models": MODELS, "distill": DISTILL},
    "annotate": {"models": MODELS, "reward": REWARD, "replay": REPLAY, "rollout": ROLLOUT},
    "ppo": {
        "models": MODELS, "reward": REWARD, "rollout": ROLLOUT, "replay": REPLAY, "ppo": PPO, "guards": GUARDS,
        "evaluation": EVALUATION,
    },
    "evaluate": {"models": MODELS, "reward": REWARD, "evaluation": EVALUATION},
}  # fmt: skip


def arithmetic_rows(count: int = sum(SPLITS.values())) -> list[Row]:
    """Pairs on sums, each prompt once; a tenth of the labels is turned round. Made here, so that they never change."""
    rows = []
    for number in range(count):
        first, second = number % 11, number // 11
        right = f"{('Sure!', 'Of course.', 'Happy to help.')[number % 3]} {first + second}."
        right += " Glad to help." if number % 2 else ""
        wrong = f"{('Ugh.', 'Easy.')[number % 2]} {first + second + 1 + number % 3}."
        wrong += " Numbers are so much fun, and I had to think for a while." if number % 5 == 0 else ""
        chosen, rejected = (wrong, right) if number % 10 == 7 else (right, wrong)
        rows.append(
            Row(
                prompt=(Message(role="user", content=f"What is {first} plus {second}?"),), chosen=chosen,
                rejected=rejected, reference=str(first + second), source="quickstart",
                category=("odd", "even")[number % 2],
            )
        )  # fmt: skip
    return rows


def write_snapshot(folder: Path, rows: list[Row], splits: Mapping[str, int] = SPLITS) -> Path:
    """A snapshot folder: the rows dealt to train, validation and evaluation, in order."""
    folder.mkdir(parents=True)
    start = 0
    for name, size in splits.items():
        records = [row.record() for row in rows[start : start + size]]
        pq.write_table(pa.Table.from_pylist(records, schema=ROW_SCHEMA), folder / f"{name}.parquet")
        start += size
    return folder


def write_stage(
    directory: Path, stage: str, inputs: Mapping[str, Path], params: Mapping[str, Any] | None = None,
    seed: int = SEED, **sections: Section,
) -> Path:  # fmt: skip
    """Write spec.json of a tiny stage; `sections` replace the tiny ones of the same name."""
    config = {name: section.model_dump(mode="json") for name, section in (SECTIONS[stage] | sections).items()}
    refs = {role: file_ref(path) for role, path in inputs.items()}
    home = str(directory.parent)
    write_spec(directory, StageSpec(stage, "night-1", home, seed, config, refs, dict(params or {}), "tests"))
    return directory


def run_here(directory: Path, stage: str) -> StageResult:
    """Run a stage in this process."""
    return run_stage(directory, importlib.import_module(STAGES[stage]).run)


def stage_environment() -> dict[str, str]:
    """What a child stage needs; one thread, no network."""
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NIGHTJAR_DEVICE": "cpu"}
    return os.environ | fixed | {"PYTHONPATH": str(ROOT)}


def start_child(directory: Path, stage: str, *prefix: str) -> subprocess.Popen[bytes]:
    """`python -m training STAGE DIRECTORY` as a child process, its output in log.txt."""
    with (directory / "log.txt").open("ab") as log:
        command = [sys.executable, *(prefix or ("-m", "training")), stage, str(directory)]
        return subprocess.Popen(command, cwd=ROOT, env=stage_environment(), stdout=log, stderr=subprocess.STDOUT)

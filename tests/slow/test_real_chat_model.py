"""A whole night on a real chat model and real preferences: six layers of SmolLM2-135M, tens of HH pairs.

The numbers mean nothing at this size; that every stage takes a real tokenizer, a real chat template and real
transcripts, and that the night ends with a judged version, does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
RECIPE = SHARED / "models" / "make_smollm2.py"
TRANSCRIPTS = SHARED / "data" / "hh-harmless" / "transcripts.jsonl.gz"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not RECIPE.is_file(), reason="the recipe of the real model is not beside the project"),
    pytest.mark.skipif(not TRANSCRIPTS.is_file(), reason="the HH transcripts are not beside the project"),
]

CUT = [
    "data.max_rows=32", "data.max_validation_rows=12", "data.evaluation_prompts=8", "data.min_rows=8",
    "models.student_layers=2", "models.max_prompt_length=96", "models.max_response_length=32",
    "reward.collapse_loss_gap=-1", "distill.max_student_teacher_kl=null", "distill.min_accuracy_retained=null",
    "distill.collapse_loss_gap=-1", "distill.epochs=1",
    "ppo.train_batch_size=12", "ppo.ppo_mini_batch_size=6", "ppo.selection_prompts=4",
    "rollout.prompts_per_round=4", "guards.kl_probe_prompts=4", "guards.perplexity_rows=4",
    "evaluation.prompts=8", "evaluation.perplexity_rows=4", "evaluation.bootstrap_samples=200",
    "registry.verify_prompts=['Hello!']",
    "gates.rules=[{metric: reward, direction: higher, baseline: reference, min_improvement: 0, min_n: 8}]",
]  # fmt: skip


@pytest.fixture(scope="session")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cut model, made once; SMOLLM2_6L names a folder to keep it in."""
    folder = Path(os.environ.get("SMOLLM2_6L") or tmp_path_factory.mktemp("models") / "smollm2-6l")
    recipe = [sys.executable, str(RECIPE), str(folder), "--layers", "6"]
    made = subprocess.run(recipe, check=False, capture_output=True, text=True)
    if made.returncode:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"the real model could not be made here: {made.stderr.strip().splitlines()[-1]}")
    return folder


def test_night_on_a_real_chat_model_ends_judged(six_layers: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "flows.cli", "run", "configs/smollm2-135m-hh.yaml", f"models.base={six_layers}",
        f"data.source={TRANSCRIPTS}", f"runtime.home={tmp_path}", "runtime.threads=1", "--plain", *CUT,
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    night = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, env=environment)
    runs = list((tmp_path / "runs").glob("*/night.json"))
    assert len(runs) == 1, night.stdout[-3000:] + night.stderr[-3000:]
    state = json.loads(runs[0].read_text())
    assert state["status"] == "finished", night.stdout[-3000:] + night.stderr[-3000:]
    stages = {file.parent.name for file in runs[0].parent.glob("*/result.json")}
    assert {"validate", "reward", "distill", "annotate", "ppo", "evaluate"} <= stages
    decision = json.loads(next(runs[0].parent.glob("**/decision.json")).read_text())
    assert decision["verdict"] in ("PASS", "FAIL", "INCONCLUSIVE")

"""DPO by TRL, in TRL's own environment. Imports nothing of this project.

Reads paths of job files from its input, a line each, and answers each with a line that begins with DONE. For each
learning rate of a job it trains from the same reference on the same pairs until the budget of CPU seconds is spent,
and leaves the weights at evenly spread moments as model folders, with `points.json` beside them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

DONE = "DONE"


class TimedTrainer(DPOTrainer):
    """Counts the reference's pass over the pairs: it is part of what DPO costs."""

    reference_seconds = 0.0

    def _precompute_ref_logps(self, *arguments: Any, **named: Any) -> Dataset:
        began = time.process_time()
        found = super()._precompute_ref_logps(*arguments, **named)
        self.reference_seconds += time.process_time() - began
        return found


class Budget(TrainerCallback):
    """Saves the policy whenever a mark is passed, off the clock, and ends training after the last one."""

    def __init__(self, marks: list[float], folder: Path, spent: float) -> None:
        self.marks, self.folder, self.spent = list(marks), folder, spent
        self.points: list[dict[str, float]] = []
        self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.process_time() - self.spent

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        seconds = time.process_time() - self.began
        if not self.marks or seconds < self.marks[0]:
            return
        while self.marks and seconds >= self.marks[0]:
            self.marks.pop(0)
        target = self.folder / f"point-{len(self.points)}"
        model.save_pretrained(str(target), safe_serialization=True)
        self.points.append({"seconds": seconds, "updates": state.global_step, "epoch": state.epoch})
        if not self.marks:
            control.should_training_stop = True
        self.began = time.process_time() - seconds


def train(job: dict[str, Any], rate: float, dataset: Dataset, tokenizer: Any, reference_seconds: float) -> float:
    """One learning rate; returns what the reference's pass took."""
    folder = Path(job["out"]) / f"{rate:.0e}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = DPOConfig(
        output_dir=str(folder / "trainer"), learning_rate=rate, lr_scheduler_type="constant", warmup_steps=10,
        per_device_train_batch_size=job["batch_size"], num_train_epochs=1000, beta=job["beta"],
        precompute_ref_log_probs=True, precompute_ref_batch_size=64, max_length=job["max_length"], seed=job["seed"],
        bf16=False, use_cpu=True, gradient_checkpointing=False, save_strategy="no", report_to="none",
        logging_strategy="no", disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    trainer = TimedTrainer(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
    _check_tokens(trainer.train_dataset, job["pairs"])
    reference_seconds = max(reference_seconds, trainer.reference_seconds)  # later rates find it cached
    budget = Budget(job["marks"], folder, reference_seconds)
    trainer.add_callback(budget)
    trainer.train()
    (folder / "points.json").write_text(json.dumps(budget.points))
    return reference_seconds


def _check_tokens(dataset: Dataset, pairs: list[dict[str, Any]]) -> None:
    """DPO must read the very tokens that the other variants read."""
    for row, pair in zip(dataset, pairs, strict=True):
        for side in ("prompt", "chosen", "rejected"):
            if list(row[f"{side}_ids"]) != pair[f"{side}_ids"]:
                raise SystemExit(f"TRL tokenises {pair[side]!r} to {row[f'{side}_ids']}, not {pair[f'{side}_ids']}")


def run(job: dict[str, Any]) -> None:
    """Every rate of a job."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    texts = [{side: pair[side] for side in ("prompt", "chosen", "rejected")} for pair in job["pairs"]]
    dataset = Dataset.from_list(texts)
    seconds = 0.0
    for rate in job["rates"]:
        seconds = train(job, rate, dataset, tokenizer, seconds)


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        run(json.loads(Path(line.strip()).read_text()))
        print(DONE, line.strip(), flush=True)


if __name__ == "__main__":
    main()

"""What a reviewer finds on the night's run: pictures, and the answers old beside new. Made from files, so also late."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.figures import calibration, gold_against_proxy, length_histogram, reward_and_kl
from training.recorder import metric_series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from training.evaluation.report_records import SampleAnswer

MODELS = ("reference", "champion", "challenger")
_REWARDS = ("reward_mean", "heldout_reward")
_DIVERGENCES = ("kl_ref", "kl_ref_offpolicy")


@dataclass(frozen=True)
class ReviewFiles:
    """Where the night's files lie; what is null or absent is left out of the review.

    `ppo_metrics`: metrics.jsonl of the ppo stage; `calibration`: the teacher's calibration.json; `answers`: the
    evaluation's parquet, with columns <model>_tokens, <model>_reward and maybe <model>_gold_reward; `kl_limit`: the
    guard's KL, drawn as a line.
    """

    ppo_metrics: Path | None = None
    calibration: Path | None = None
    answers: Path | None = None
    kl_limit: float | None = None


def night_figures(files: ReviewFiles) -> dict[str, Figure]:
    """Pictures by file name; only those for which there are numbers."""
    made = {
        "reward_and_kl.png": _training(files),
        "calibration.png": _calibration(files),
        **(_answers(files.answers) if files.answers is not None and files.answers.is_file() else {}),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def answers_table(samples: Sequence[SampleAnswer]) -> dict[str, list[Any]]:
    """Columns for MLflow's table view: prompt, old answer, new answer side by side, then what else there is.

    Old is the champion, or the reference on the first night. Models without any answer are left out.
    """
    first_night = all(sample.champion is None for sample in samples)
    order = ("reference", "challenger") if first_night else ("champion", "challenger", "reference")
    answers = {model: [getattr(sample, model) for sample in samples] for model in order}
    there = [model for model in order if any(answer is not None for answer in answers[model])]
    columns: dict[str, list[Any]] = {"prompt": [sample.prompt for sample in samples]}
    columns |= {model: answers[model] for model in there}
    return columns | {f"{model}_reward": [getattr(sample, f"{model}_reward") for sample in samples] for model in there}


def _training(files: ReviewFiles) -> Figure | None:
    if files.ppo_metrics is None or not files.ppo_metrics.is_file():
        return None
    rewards, divergences = _series(files.ppo_metrics, _REWARDS), _series(files.ppo_metrics, _DIVERGENCES)
    return reward_and_kl(rewards, divergences, files.kl_limit) if rewards or divergences else None


def _series(file: Path, names: Sequence[str]) -> dict[str, tuple[list[int], list[float]]]:
    found = {name: metric_series(file, name) for name in names}
    return {name: series for name, series in found.items() if series[0]}


def _calibration(files: ReviewFiles) -> Figure | None:
    if files.calibration is None or not files.calibration.is_file():
        return None
    bins = json.loads(files.calibration.read_text(encoding="utf-8")).get("bins", [])
    return calibration(bins) if bins else None


def _answers(parquet: Path) -> Mapping[str, Figure | None]:
    """Lengths, and gold against proxy where a gold reward exists."""
    import pyarrow.parquet as pq

    table = pq.read_table(parquet).to_pydict()
    columns = {model: table.get(f"{model}_tokens", ()) for model in MODELS}
    lengths = {model: [float(n) for n in found if n is not None] for model, found in columns.items() if found}
    pairs = {model: _paired(table.get(f"{model}_reward"), table.get(f"{model}_gold_reward")) for model in MODELS}
    scores = {model: pair for model, pair in pairs.items() if pair[0]}
    return {
        "answer_lengths.png": length_histogram(lengths, unit="tokens") if lengths else None,
        "gold_against_proxy.png": gold_against_proxy(scores) if scores else None,
    }


def _paired(proxy: Sequence[Any] | None, gold: Sequence[Any] | None) -> tuple[list[float], list[float]]:
    if proxy is None or gold is None:
        return [], []
    both = [(p, g) for p, g in zip(proxy, gold, strict=True) if p is not None and g is not None]
    return [p for p, _ in both], [g for _, g in both]

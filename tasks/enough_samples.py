"""Could the gate pass at all? Known as soon as the data are split, long before anything is trained."""

from __future__ import annotations

from pathlib import Path

from configs.schema import NightConfig
from training.data.snapshot import read_manifest
from training.errors import DataError

_OF_VALIDATION = frozenset({"perplexity", "reward_model_accuracy"})
"""Metrics of held-out rows; every other one rests on the frozen evaluation prompts."""


def check_samples(config: NightConfig, snapshot: Path, *, has_champion: bool) -> None:
    """Refuse a night whose gate must fail because its snapshot holds too little out.

    Counts rows, of which several may share a prompt: what is refused could not have passed, what is not may still fail.
    Raises DataError naming each rule, its samples, and what to write.
    """
    rows = read_manifest(snapshot).rows
    judged = (r for r in config.gates.rules if r.severity == "block" and (has_champion or r.holds_without_champion))
    needed = ((rule, "validation" if rule.metric in _OF_VALIDATION else "evaluation") for rule in judged)
    short = [(rule, split) for rule, split in needed if rows.get(split, 0) < rule.min_n]
    if not short:
        return
    told = "; ".join(
        f"{rule.label} needs {rule.min_n} samples, and {rows.get(split, 0)} {split} rows are held out"
        for rule, split in short
    )
    keys = " and ".join(f"data.{split}_fraction" for split in sorted({split for _, split in short}))
    raise DataError(
        f"no policy could pass this night's gate: {told}; nothing was trained, and the champion stays",
        f"bring more data, raise {keys}, or lower min_n of the rule if fewer samples are enough for you",
    )

"""Evaluation prompts stay the same from night to night, so that nights can be compared."""

from __future__ import annotations

from pathlib import Path

from configs.schema import NightConfig
from tasks.night_state import NightBook, NightState
from training.contract import FileRef, file_ref, read_result
from training.errors import ContractError

FILE = "evaluation.parquet"
_DECIDING = ("source", "format", "split_salt", "evaluation_fraction", "evaluation_prompts")


def frozen_evaluation(book: NightBook, state: NightState, config: NightConfig) -> FileRef | None:
    """The evaluation prompts of the chain's last judged night; None on the first, and where the data settings that
    decide them have changed."""
    earlier = [n for n in book.nights(state.name) if n.index < state.index and n.status in ("finished", "skipped")]
    if not earlier:
        return None
    last = earlier[-1]
    try:
        if _deciding(book.config(last.night)) != _deciding(config):
            return None
        snapshot = Path(read_result(Path(last.stages["validate"].directory)).output("snapshot").path)
        return file_ref(snapshot / FILE)
    except (ContractError, KeyError):
        return None


def _deciding(config: NightConfig) -> tuple[object, ...]:
    return (config.seed, config.data.quickstart is None, *(getattr(config.data, name) for name in _DECIDING))

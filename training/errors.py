"""Errors of the training side. Each says who can fix it and whether the run survives."""

from __future__ import annotations

from configs.errors import ConfigError, NightjarError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DataError",
    "DiskFullError",
    "GateError",
    "GuardStop",
    "ModelFolderError",
    "NightjarError",
    "StageError",
    "StoreError",
]


class DataError(NightjarError, ValueError):
    """The user's data cannot be used as it is; the owner of the data fixes it. The night stops, nothing is lost."""


class ModelFolderError(NightjarError, ValueError):
    """A model folder is incomplete or unsafe (no tokenizer, pickle only, missing head); the user points elsewhere."""


class ContractError(NightjarError, RuntimeError):
    """A stage directory does not hold what its manifest promises; the stage is run again."""


class CheckpointError(NightjarError, RuntimeError):
    """A checkpoint is torn or tampered with; the one before it is used."""


class StoreError(NightjarError, RuntimeError):
    """The trajectory store on disk is inconsistent beyond its own recovery; names the segment."""


class DiskFullError(NightjarError, RuntimeError):
    """The disk or the quota is full; the user makes room. What was complete stays, and the night goes on from it."""


class GateError(NightjarError, ValueError):
    """The gate cannot judge: no rules, or a report that is not one. The champion stays."""


class StageError(NightjarError, RuntimeError):
    """A stage ran and failed (collapsed reward model, zero applied steps, ...); the night fails, the champion stays."""


class GuardStop(StageError):
    """A guard rule ended training: its action was `stop`, or its rollbacks are used up."""

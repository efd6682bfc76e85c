"""What a stage function is given, and what it hands back. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from configs.schema.base import Section
from training.contract import CHECKPOINTS, StageSpec
from training.errors import ContractError
from training.recorder import Recorder

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True)
class StageContext:
    """A stage's directory, its spec and its recorder."""

    directory: Path
    spec: StageSpec
    recorder: Recorder

    def input(self, role: str) -> Path:
        """Where the input `role` lies."""
        if role not in self.spec.inputs:
            raise ContractError(f"stage {self.spec.stage} was given no input {role!r}")
        return Path(self.spec.inputs[role].path)

    def has_input(self, role: str) -> bool:
        """Whether an optional input was given."""
        return role in self.spec.inputs

    def section(self, name: str, kind: type[AnySection]) -> AnySection:
        """A typed section of the config."""
        return self.spec.section(name, kind)

    def output(self, name: str) -> Path:
        """A path inside the stage directory for an output; its parent exists."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory / name

    @property
    def checkpoints(self) -> Path:
        """Folder of the stage's checkpoints."""
        return self.directory / CHECKPOINTS


@dataclass(frozen=True)
class StageOutcome:
    """What the stage made: output paths by role, final metrics, and small facts for the report."""

    outputs: Mapping[str, Path] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


StageFunction = Callable[[StageContext], StageOutcome]

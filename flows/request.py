"""The parameters of a night, small and typed: they become the form of a Prefect deployment."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator


class NightRequest(BaseModel):
    """Which night is wanted. Paths and settings only; data and models are named in the config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str = Field(description="Path of the night's YAML on the machine that runs it.")
    overrides: tuple[str, ...] = Field(default=(), description="Settings laid over the YAML, each key.path=value.")
    again: bool = Field(default=False, description="Run a new night even when there is no new data.")
    force: bool = Field(default=False, description="Promote whatever the gate says; needs who and why.")
    who: str = Field(default="", description="With force: who decides.")
    why: str = Field(default="", description="With force: why; it becomes part of the version's record.")
    stale_after_hours: Annotated[float, Field(gt=0)] = Field(
        default=168.0,
        description="Of missed starts one catches up, unless even the newest was due longer ago than this.",
    )

    @model_validator(mode="after")
    def _force_is_explained(self) -> NightRequest:
        if self.force and not (self.who.strip() and self.why.strip()):
            raise ValueError("a forced promotion needs who and why")
        return self

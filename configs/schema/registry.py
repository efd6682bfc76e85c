"""Where versions and runs are kept, how a promotion is proved, and when a champion is taken back later."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from configs.credentials import holds_password
from configs.schema.base import Minutes, NonNegativeInt, PositiveInt, Prompts, Section, at_most


class RegistryConfig(Section):
    """MLflow: which server, which names, what is verified before the alias moves."""

    model: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")] = (
        "nightjar-policy"
    )
    """Name of the registered model; its aliases are champion, challenger and previous."""
    tracking_uri: str | None = None
    """MLflow server (http://host:port) or database; null: MLFLOW_TRACKING_URI, or mlflow.db in the home."""
    experiment: Annotated[str, Field(min_length=1, max_length=200)] = "nightjar"
    """Experiment that holds one run a night."""
    artifact_location: str | None = None
    """Where a new experiment keeps its artifacts; null: mlartifacts in the home, or what the server decides."""
    reach_timeout_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 15.0
    """A server that has not answered for this long before the night counts as down; nothing is computed then."""
    lock_wait_seconds: Annotated[float, Field(ge=0.0), at_most(86_400.0, "seconds")] = 30.0
    """How long a promotion or rollback waits for another one of the same model."""
    verify_prompts: Annotated[list[str], Field(min_length=1, max_length=32)] = Field(
        default_factory=lambda: ["Hello, who are you?", "What is two plus three?"]
    )
    """Prompts answered by the stored version before, and through the alias after, the alias moves."""
    verify_max_new_tokens: Annotated[int, Field(ge=1, le=512)] = 16
    """Tokens an answer of the verification may have."""
    verify_timeout_minutes: Minutes = 20.0
    """A version that has not loaded and answered in this time is refused."""
    max_points: Annotated[int, Field(ge=10, le=2_000)] = 2_000
    """Points a metric may have in MLflow; longer series are thinned evenly and keep their last point."""
    retention_keep: NonNegativeInt = 20
    """How many of the newest versions `nightjar retention --apply` leaves alone, besides those that it never deletes:
    every version that a rollback may return to, that an alias names, or that waits for a person. No night deletes."""

    @field_validator("verify_prompts")
    @classmethod
    def _prompts_say_something(cls, prompts: list[str]) -> list[str]:
        if any(not prompt.strip() for prompt in prompts):
            raise ValueError("an empty prompt verifies nothing; write a sentence or remove the entry")
        return prompts

    @field_validator("tracking_uri")
    @classmethod
    def _uri_of_a_store(cls, uri: str | None) -> str | None:
        if uri is not None and "://" not in uri:
            raise ValueError("write a URI such as http://127.0.0.1:5000 or sqlite:////var/lib/nightjar/mlflow.db")
        return uri

    @model_validator(mode="after")
    def _no_password(self) -> RegistryConfig:
        # The config is stored with every run. Judged on the section, since the error of a field repeats its value.
        if self.tracking_uri is not None and holds_password(self.tracking_uri):
            raise ValueError(
                "tracking_uri holds a password, and the config is stored with every run; set the whole URI as "
                "MLFLOW_TRACKING_URI in the environment, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if self.artifact_location is not None and holds_password(self.artifact_location):
            raise ValueError(
                "artifact_location holds a password, and the config is stored with every run; set the store's own "
                "variables in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        return self


class WatchLimit(Section):
    """A bound that the champion must keep after its promotion."""

    metric: Annotated[str, Field(min_length=1)]
    """Name of the measured metric, as in the evaluation report."""
    min: float | None = None
    """The value may not fall below this."""
    max: float | None = None
    """The value may not rise above this."""
    max_drop: Annotated[float, Field(ge=0.0)] | None = None
    """The value may not fall more than this below the first measurement of the same champion."""

    @model_validator(mode="after")
    def _bounds_something(self) -> WatchLimit:
        if self.min is None and self.max is None and self.max_drop is None:
            raise ValueError(f"limit on {self.metric} bounds nothing; write min, max or max_drop")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"limit on {self.metric}: min {self.min} is above max {self.max}; no value passes")
        return self


class WatchConfig(Section):
    """Re-measuring the champion on its own schedule."""

    limits: list[WatchLimit] = Field(default_factory=list)
    """Bounds of the champion; empty: the watch has nothing to judge and says so."""
    patience: PositiveInt = 3
    """Consecutive measurements with a breach before the champion is rolled back."""
    prompts: Prompts = 64
    """Frozen evaluation prompts used a measurement."""

    @model_validator(mode="after")
    def _one_limit_a_metric(self) -> WatchConfig:
        names = [limit.metric for limit in self.limits]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"more than one limit on {', '.join(doubled)}; write min, max and max_drop in one entry")
        return self

"""What the parameter models of the small flows share. Each becomes the form of a Prefect deployment."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

BLOCK_NAME = r"^[a-z0-9-]+/[a-z0-9-]+$"


class Form(BaseModel):
    """Frozen and closed: a mistyped key is an error at the form, not a setting that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Home = Annotated[
    str,
    Field(
        title="Home",
        min_length=1,
        description="Folder of runs, models and journal, as the worker of this flow sees it.",
        examples=["/var/lib/nightjar"],
    ),
]


def _nothing_if_empty(value: object) -> object:
    """An event that does not name it becomes an empty text in the automation's template."""
    return None if value == "" else value


Chain = Annotated[
    str | None,
    BeforeValidator(_nothing_if_empty),
    Field(title="Chain", description="`name` of the chain's config. Needed when the home holds several chains."),
]
Model = Annotated[
    str | None,
    BeforeValidator(_nothing_if_empty),
    Field(title="Registered model", description="Chooses the chain by its registry.model, instead of its name."),
]
Blocks = Annotated[
    tuple[Annotated[str, Field(pattern=BLOCK_NAME)], ...],
    Field(
        title="Tell",
        description="Notification blocks that hear of the outcome, each type/name; none is fine.",
        examples=[["slack-webhook/ops"]],
    ),
]

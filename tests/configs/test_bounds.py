"""Every number of a config has bounds: no NaN, no infinity, no slip of the pen that fills a disk or a lifetime."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from configs.schema import ConfigError, NightConfig, load_config
from tests.configs.test_loading import written

IN_A_METRICS_UNIT = {"min", "max", "max_drop", "threshold"}
"""Limits on a metric: what is large depends on the metric."""


def sections(annotation: Any = NightConfig) -> Iterator[type[BaseModel]]:
    """Every section, nested ones and those in lists included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    for inner in get_args(annotation):
        yield from sections(inner)


def kinds(annotation: Any) -> set[type]:
    inner = get_args(annotation)
    return {annotation} if not inner else set().union(*map(kinds, inner))


FIELDS = [
    pytest.param(section, name, id=f"{section.__name__}.{name}")
    for section in dict.fromkeys(sections())
    for name, field in section.model_fields.items()
    if kinds(field.annotation) & {int, float}
]


def complaints(section: type[BaseModel], name: str, value: object) -> list[str]:
    """What is said of this field alone; other fields of the section may be missing."""
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return [item["msg"] for item in error.errors() if item["loc"][:1] == (name,)]
    return []


def test_there_are_many_numbers() -> None:
    assert len(FIELDS) > 100


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_no_number_is_beyond_all_bounds(section: type[BaseModel], name: str) -> None:
    for value in (math.nan, math.inf, -math.inf, ".nan"):
        assert complaints(section, name, value), value
    if name not in IN_A_METRICS_UNIT:
        assert complaints(section, name, 10**12)
        assert complaints(section, name, -(10**12))


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_yes_and_no_are_no_numbers(section: type[BaseModel], name: str) -> None:
    for value in (True, False):
        assert complaints(section, name, value) or bool in kinds(section.model_fields[name].annotation), value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ppo.ppo_epochs=1000000000", "ppo.ppo_epochs: more than any night needs; write at most 1,000 passes"),
        ("ppo.rounds=1000000", "10,000 rounds"),
        ("models.student_layers=1000000000", "models.student_layers: more than any night needs; write at most 1,000"),
        ("models.quickstart_layers=1000000000", "1,000 decoder layers"),
        ("ppo.train_batch_size=1000000000", "100,000 rows side by side"),
        ("sft.batch_size=1000000000", "100,000 rows side by side"),
        ("models.max_response_length=1000000000000", "10,000,000 tokens"),
        ("reward.epochs=1e6", "1,000.0 passes over the data"),
        ("runtime.stage_timeout_minutes=1e9", "43,200.0 minutes"),
        ("runtime.lease_seconds=1e9", "86,400.0 seconds"),
        ("runtime.min_free_disk_gb=1e9", "1,000,000.0 GB"),
        ("distill.lora_rank=100000", "8,192 (the rank of an adapter)"),
        ("ppo.actor_lr=.inf", "finite"),
        ("ppo.kl_ctrl.kl_coef=nan", "finite"),
        ("gates.rules=[{metric: reward, min: .nan}]", "gates.rules[0].min"),
    ],
)  # fmt: skip
def test_bounds_are_told_with_their_unit(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(written(tmp_path), [override])
    assert words in str(refused.value)

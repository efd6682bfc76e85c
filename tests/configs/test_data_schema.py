"""The data section: what it accepts, and what it refuses in which words."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.credentials import without_credentials
from configs.schema import NightConfig
from configs.schema.data import ColumnsConfig, DataConfig, QuickstartConfig, ResponseColumn
from configs.schema.loading import explain


def refused(**content: object) -> str:
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate(content)
    return str(caught.value)


def test_one_origin_is_needed_and_only_one() -> None:
    assert "write `source: PATH`" in refused()
    assert "exclude each other" in refused(source="x.parquet", quickstart={})
    assert DataConfig.model_validate({"quickstart": {}}).quickstart == QuickstartConfig()


@pytest.mark.parametrize(
    "source",
    [
        "s3://AKIA:hunter2@bucket/pairs",
        "s3://AKIA:hunter2/with/slashes@bucket/pairs",
        "simplecache::https://ada:hunter2@example.org/pairs.parquet",
        "https://example.org/pairs.parquet?sig=hunter2&se=2026-12-01",
    ],
)
def test_a_password_in_the_source_is_refused_and_not_repeated(source: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate({"source": source})
    (error,) = caught.value.errors()
    assert "AWS_SECRET_ACCESS_KEY" in error["msg"]
    # An error of the section shows no value; one of the field `source` would.
    assert error["loc"] == ()
    assert "hunter2" not in explain("night.yaml", _in_a_night(source))
    assert "hunter2" not in without_credentials(f"{source}: no such file")


def _in_a_night(source: str) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        NightConfig.model_validate({"name": "n", "data": {"source": source}})
    return caught.value


@pytest.mark.parametrize(
    "source",
    [
        "s3://bucket/a@b",
        "abfs://container@account/x",
        "https://example.org:8080/a@b",
        "pairs:old@1.parquet",
        "file:///x",
        "s3://bucket/x?region=eu",
    ],
)
def test_a_source_without_a_password_is_taken(source: str) -> None:
    assert DataConfig(source=source).source == source


def test_unknown_keys_and_changes_are_refused() -> None:
    assert "extra" in refused(source="x", sauce="y").lower()
    config = DataConfig(source="x")
    with pytest.raises(ValidationError):
        config.source = "y"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format": "pairs", "columns": {"responses": ["a"]}}, "write `format: responses`"),
        ({"format": "hh", "columns": {"prompt": "q"}}, "remove columns.prompt"),
        ({"evaluation_fraction": 0.5, "validation_fraction": 0.5}, "at most 0.9"),
        ({"min_answer_characters": 10, "max_answer_characters": 5}, "lower the one or raise the other"),
        ({"max_rows": 4, "min_rows": 16}, "lower min_rows"),
        ({"chosen_labels": ["A"], "rejected_labels": ["a"]}, "keep each label in one of them"),
        ({"max_quarantine": 1.5}, "less than or equal to 1"),
        ({"evaluation_fraction": 0.0}, "greater than 0"),
        ({"near_duplicate_threshold": 0.3}, "greater than or equal to 0.5"),
        ({"columns": {"responses": [{"txt": "a"}]}}, "columns.responses.0"),
    ],
)
def test_contradictions_say_what_to_write(content: dict[str, object], words: str) -> None:
    assert words in refused(source="x", **content)


def test_quickstart_takes_no_columns_and_flips_less_than_half() -> None:
    assert "remove data.format and data.columns" in refused(quickstart={}, columns={"prompt": "q"})
    assert "remove data.format and data.columns" in refused(quickstart={}, format="hh")
    assert "less than 0.5" in refused(quickstart={"flip_share": 0.5})


def test_bare_response_paths_and_names_of_writers() -> None:
    columns = ColumnsConfig.model_validate(
        {"responses": ["small.solution", {"text": "big.solution", "source": "big-1"}]}
    )
    assert columns.responses[0] == ResponseColumn(text="small.solution")
    assert [column.writer for column in columns.responses] == ["small", "big-1"]


def test_survives_the_way_through_a_stage_spec() -> None:
    config = DataConfig.model_validate(
        {"source": "x", "columns": {"prompt": "q", "responses": ["a.text"]}, "allowed_sources": ["s"], "max_rows": 99}
    )
    assert DataConfig.model_validate(config.model_dump(mode="json")) == config
    generated = DataConfig.model_validate({"quickstart": {"start_date": "2025-03-01"}})
    assert DataConfig.model_validate(generated.model_dump(mode="json")) == generated


def test_every_field_is_documented() -> None:
    for model in (DataConfig, ColumnsConfig, QuickstartConfig, ResponseColumn):
        assert [name for name, field in model.model_fields.items() if not field.description] == []

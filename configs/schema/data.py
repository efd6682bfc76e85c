"""Where preferences come from, what is refused, and how they are split."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from configs.credentials import holds_password
from configs.schema.base import Characters, NonNegative, Prompts, Rows, Section, Share, UserPath, at_most

ColumnPath = Annotated[str, Field(min_length=1, max_length=200)]
"""A column's name, or a dotted path into a nested one, such as `6b_finetuning.solution`."""


class ResponseColumn(Section):
    """One stored answer of a row in the `responses` format. A bare path may be written instead of the mapping."""

    text: ColumnPath
    """Where the answer's text is."""
    source: Annotated[str, Field(min_length=1)] | None = None
    """Who wrote it; null: the first part of the path."""
    reward: ColumnPath | None = None
    """Where its reward or verdict is (number, or true/false read as 1/0); null: none is stored."""

    @property
    def writer(self) -> str:
        """Name of the writer of this answer."""
        return self.source or self.text.split(".")[0]


class ColumnsConfig(Section):
    """Names of the columns in the user's data. null: the column of that very name, where there is one."""

    prompt: ColumnPath | None = None
    """Question, or chat messages; absent in HH transcripts."""
    chosen: ColumnPath | None = None
    """Preferred answer: text, chat messages, or a whole transcript."""
    rejected: ColumnPath | None = None
    """The other answer, in the same shape."""
    responses: tuple[ResponseColumn, ...] = ()
    """Stored answers of format `responses`; empty: a column `responses`, a list of texts or {text, source, reward}."""
    reference: ColumnPath | None = None
    """Ground truth for reward functions."""
    source: ColumnPath | None = None
    """Where a row came from; a slice of the evaluation report."""
    category: ColumnPath | None = None
    """Kind of question; a slice of the evaluation report."""
    label: ColumnPath | None = None
    """Which side the annotator preferred, where the column names do not say it already; see data.chosen_labels."""
    label_weight: ColumnPath | None = None
    """Trust in the label, in (0, 1]; without it 1."""

    @field_validator("responses", mode="before")
    @classmethod
    def _bare_paths(cls, given: Any) -> Any:
        if isinstance(given, list):
            return [{"text": item} if isinstance(item, str) else item for item in given]
        return given


class QuickstartConfig(Section):
    """The built-in generator: small arithmetic questions whose true reward is known."""

    partitions: Annotated[int, Field(ge=1, le=366)] = 2
    """Nights for which data exists; after the last one nothing new arrives."""
    pairs_per_night: Annotated[int, Field(ge=50, le=200_000)] = 2_250
    """Pairs in one night's partition."""
    flip_share: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.1
    """Share of pairs whose label is turned round on purpose."""
    label_noise: NonNegative = 0.15
    """Scale of the logistic noise an annotator adds to the gold difference, in gold reward units."""
    start_date: date = date(2025, 1, 1)
    """Date of the first night's partition."""


class DataConfig(Section):
    """The data section. Exactly one of `source` and `quickstart` is given."""

    source: Annotated[UserPath, Field(min_length=1)] | None = None
    """A parquet, JSONL or JSONL.gz file, a folder of dated partitions of them, or a URI for pyarrow or fsspec."""
    quickstart: QuickstartConfig | None = None
    """Settings of the built-in generator instead of a source; `{}` takes its defaults."""
    format: Literal["auto", "pairs", "chat", "hh", "responses"] = "auto"
    """Shape of a row: three texts, chat messages, HH transcripts or stored answers; auto finds out by the columns."""
    columns: ColumnsConfig = ColumnsConfig()
    """Names of the columns."""
    chosen_labels: tuple[str, ...] = ("chosen", "a", "1", "true")
    """Values of columns.label (as text, any case) that say: chosen is the better side."""
    rejected_labels: tuple[str, ...] = ("rejected", "b", "0", "false")
    """Values of columns.label that say: rejected is the better side, so the two are exchanged."""
    allowed_sources: tuple[str, ...] = ()
    """Sources that may appear; a row of any other is quarantined. Empty: all."""
    default_source: Annotated[str, Field(min_length=1)] | None = None
    """Source of rows without a source column; null: the name of the file or folder."""
    max_quarantine: Share = 0.05
    """Share of quarantined rows above which the night fails."""
    min_rows: Rows = 16
    """Training rows below which the night fails."""
    max_rows: Rows | None = None
    """At most this many training rows, chosen by the night's seed; null: all."""
    max_validation_rows: Rows | None = None
    """At most this many validation rows, chosen by the night's seed; null: all."""
    evaluation_prompts: Prompts = 512
    """At most this many evaluation prompts; the first of the oldest partitions, so that they stay the same ones."""
    evaluation_fraction: Annotated[float, Field(gt=0.0, le=0.5)] = 0.05
    """Share of the prompts that evaluation may use and training never sees."""
    validation_fraction: Annotated[float, Field(ge=0.0, le=0.5)] = 0.05
    """Share of the prompts held out for reward models and perplexity."""
    split_salt: Annotated[str, Field(min_length=1)] = "nightjar"
    """Mixed into the hash that splits prompts; another salt is another split."""
    max_prompt_characters: Characters = 65_536
    """A longer prompt (all its messages together) is quarantined."""
    min_answer_characters: Annotated[int, Field(ge=0), at_most(100_000_000, "characters")] = 1
    """A shorter answer is quarantined; spaces at the ends do not count."""
    max_answer_characters: Characters = 65_536
    """A longer answer is quarantined."""
    near_duplicate_threshold: Annotated[float, Field(ge=0.5, le=1.0)] | None = 0.8
    """Jaccard likeness of three-word shingles from which two texts count as one; null turns the near checks off."""

    @model_validator(mode="after")
    def _one_origin(self) -> DataConfig:
        if self.source is None and self.quickstart is None:
            raise ValueError(
                "no data is named; write `source: PATH` (file, folder or URI), or `quickstart: {}` for the generator"
            )
        if self.source is not None and self.quickstart is not None:
            raise ValueError("source and quickstart exclude each other; remove one of them")
        return self

    @model_validator(mode="after")
    def _no_password(self) -> DataConfig:
        # The config is stored with every run. Judged on the section, since the error of a field repeats its value.
        if self.source is not None and holds_password(self.source):
            raise ValueError(
                "source holds a password, and the config is stored with every run; write the URI without it, and set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or what your storage reads) in the environment"
            )
        return self

    @model_validator(mode="after")
    def _shape_and_columns_agree(self) -> DataConfig:
        if self.columns.responses and self.format not in ("auto", "responses"):
            raise ValueError(
                f"columns.responses belongs to format `responses`, not `{self.format}`; write `format: responses`"
            )
        if self.format == "hh" and self.columns.prompt:
            raise ValueError(
                "format `hh` finds the prompt inside the transcripts; remove columns.prompt, or write `format: pairs`"
            )
        if self.quickstart is not None and (self.format not in ("auto", "pairs") or self.columns != ColumnsConfig()):
            raise ValueError("the quickstart generator writes its own columns; remove data.format and data.columns")
        both = {label.casefold() for label in self.chosen_labels} & {label.casefold() for label in self.rejected_labels}
        if both:
            raise ValueError(
                f"{sorted(both)} stand in chosen_labels and in rejected_labels; keep each label in one of them"
            )
        return self

    @model_validator(mode="after")
    def _limits_agree(self) -> DataConfig:
        held_out = self.evaluation_fraction + self.validation_fraction
        if held_out > 0.9:
            raise ValueError(
                f"evaluation_fraction + validation_fraction = {held_out:g} leaves too little to train on; "
                "keep the sum at most 0.9"
            )
        if self.min_answer_characters > self.max_answer_characters:
            raise ValueError(
                f"min_answer_characters {self.min_answer_characters} is above max_answer_characters "
                f"{self.max_answer_characters}; lower the one or raise the other"
            )
        if self.max_rows is not None and self.max_rows < self.min_rows:
            raise ValueError(f"max_rows {self.max_rows} is below min_rows {self.min_rows}; raise it or lower min_rows")
        return self

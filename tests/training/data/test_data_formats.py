"""Raw records of the real shapes become rows; records that are not what they should be become named problems."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema.data import DataConfig
from training.data.formats import SHAPES, choose_shape, normalise
from training.data.reasons import Problem, Reason
from training.data.schema import Row
from training.errors import DataError

USER = {"role": "user", "content": "Why?"}
YES = {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}


def config(**content: Any) -> DataConfig:
    return DataConfig.model_validate({"source": "x"} | content)


def row_of(raw: dict[str, Any], **content: Any) -> Row:
    settings = config(**content)
    return normalise(raw, choose_shape(settings, [raw], "file"), settings, "p", "default")


def problem_of(raw: dict[str, Any], shape: str, **content: Any) -> Reason:
    with pytest.raises(Problem) as caught:
        normalise(raw, SHAPES[shape], config(**content), "p", "default")
    return caught.value.reason


PAIR = {"prompt": "Why?", "chosen": "Yes.", "rejected": "No."}


@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (PAIR, "pairs"),
        ({"prompt": [USER], "chosen": "Yes.", "rejected": "No."}, "chat"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, "chat"),
        ({"prompt": "Why?", "chosen": [USER, YES], "rejected": [USER, NO]}, "chat"),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, "chat"),
        ({"chosen": "\n\nHuman: Why?\n\nAssistant: Yes.", "rejected": "\n\nHuman: Why?\n\nAssistant: No."}, "hh"),
        ({"prompt": "\n\nHuman: Why?\n\nAssistant:", "chosen": "Yes.", "rejected": "No."}, "pairs"),
    ],
)
def test_every_shape_gives_the_same_row(raw: dict[str, Any], shape: str) -> None:
    found = choose_shape(config(), [raw], "file").NAME
    assert found == shape
    row = row_of(raw)
    assert (row.prompt, row.chosen, row.rejected) == ((USER,), "Yes.", "No.")
    assert row.row_id == row_of(PAIR).row_id
    assert (row.source, row.category, row.partition, row.label_weight) == ("default", "none", "p", 1.0)


def test_multi_turn_transcript_becomes_messages() -> None:
    talk = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"
    row = row_of({"chosen": talk + " Yes.", "rejected": talk + " No.\n\nReally."})
    assert [turn["role"] for turn in row.prompt] == ["user", "assistant", "user"]
    assert [turn["content"] for turn in row.prompt] == ["Hi", "Hello", "Why?"]
    assert row.rejected == "No.\n\nReally."


def test_system_turn_of_the_chats_is_kept() -> None:
    system = {"role": "system", "content": "Be brief."}
    row = row_of({"prompt": "Why?", "chosen": [system, USER, YES], "rejected": [system, USER, NO]})
    assert row.prompt == (system, USER)


def test_shared_gpt_keys_roles_and_content_parts() -> None:
    user = {"from": "human", "value": "Why?"}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]}
    row = row_of({"chosen": [user, parts], "rejected": [user, {"from": "gpt", "value": "No."}]})
    assert (row.prompt, row.chosen) == ((USER,), "Yes.")


def test_columns_are_renamed_and_nested_ones_found() -> None:
    raw = {"q": {"text": "Why?"}, "good": "Yes.", "bad": "No.", "from": 7, "kind": "k", "w": 0.25, "truth": 3.0}
    columns = {
        "prompt": "q.text",
        "chosen": "good",
        "rejected": "bad",
        "source": "from",
        "category": "kind",
        "label_weight": "w",
        "reference": "truth",
    }
    row = row_of(raw, columns=columns)
    assert (row.source, row.category, row.label_weight, row.reference) == ("7", "k", 0.25, "3")


@pytest.mark.parametrize(("label", "turned"), [("A", False), (1, False), (True, False), ("b", True), (0.0, True)])
def test_label_column_says_which_side_is_better(label: object, turned: bool) -> None:
    row = row_of(PAIR | {"who": label}, columns={"label": "who"})
    assert row.chosen == ("No." if turned else "Yes.")


def test_unnamed_label_column_is_left_alone() -> None:
    assert row_of(PAIR | {"label": "rejected"}).chosen == "Yes."


def test_trajectories_from_named_columns() -> None:
    raw = {
        "question": "2+2?",
        "truth": "A: 4",
        "small": {"solution": "A: 5", "ok": False},
        "big": {"solution": "A: 4", "ok": True},
        "none": {"solution": "  ", "ok": True},
    }
    responses = [{"text": f"{name}.solution", "reward": f"{name}.ok"} for name in ("small", "big", "none", "absent")]
    row = row_of(raw, columns={"prompt": "question", "reference": "truth", "responses": responses})
    assert row.responses == (
        {"text": "A: 5", "source": "small", "reward": 0.0},
        {"text": "A: 4", "source": "big", "reward": 1.0},
    )
    assert (row.chosen, row.reference, row.is_pair) == (None, "A: 4", False)


def test_trajectories_from_a_list_column() -> None:
    row = row_of({"prompt": [USER], "responses": ["Yes.", {"text": "No.", "source": "m", "reward": 0.1}]})
    assert row.responses is not None
    assert [item["source"] for item in row.responses] == ["stored", "m"]
    assert row.responses[1]["reward"] == pytest.approx(0.1)
    assert Row.from_record(row.record()).row_id == row.row_id


TALK = "\n\nHuman: Why?\n\nAssistant:"


@pytest.mark.parametrize(
    ("raw", "shape", "reason"),
    [
        ({"prompt": "Why?", "chosen": "Yes."}, "pairs", Reason.MISSING_VALUE),
        (PAIR | {"chosen": 3}, "pairs", Reason.WRONG_TYPE),
        (PAIR | {"label_weight": 0.0}, "pairs", Reason.BAD_LABEL_WEIGHT),
        (PAIR | {"label_weight": True}, "pairs", Reason.BAD_LABEL_WEIGHT),
        (PAIR | {"label_weight": float("nan")}, "pairs", Reason.BAD_LABEL_WEIGHT),
        ({"chosen": [USER, YES], "rejected": [USER | {"content": "?"}, NO]}, "chat", Reason.PROMPTS_DIFFER),
        ({"prompt": "Other?", "chosen": [USER, YES], "rejected": [USER, NO]}, "chat", Reason.PROMPTS_DIFFER),
        ({"chosen": [USER], "rejected": [USER, NO]}, "chat", Reason.NO_ASSISTANT_TURN),
        ({"chosen": [], "rejected": [USER, NO]}, "chat", Reason.NO_ASSISTANT_TURN),
        ({"chosen": [YES], "rejected": [NO]}, "chat", Reason.EMPTY_PROMPT),
        ({"chosen": [USER | {"role": "judge"}, YES], "rejected": [USER, NO]}, "chat", Reason.UNKNOWN_ROLE),
        ({"chosen": [USER | {"content": None}, YES], "rejected": [USER, NO]}, "chat", Reason.MISSING_VALUE),
        ({"chosen": [USER | {"content": 5}, YES], "rejected": [USER, NO]}, "chat", Reason.WRONG_TYPE),
        ({"chosen": ["Why?", YES], "rejected": [USER, NO]}, "chat", Reason.WRONG_TYPE),
        ({"chosen": {"a": 1}, "rejected": [USER, NO]}, "chat", Reason.WRONG_TYPE),
        ({"chosen": "no marker", "rejected": TALK + " No."}, "hh", Reason.NO_ASSISTANT_TURN),
        ({"chosen": TALK + " a\n\nHuman: b", "rejected": TALK + " c"}, "hh", Reason.RUNS_INTO_NEXT_TURN),
        ({"chosen": TALK + " a", "rejected": "\n\nHuman: What?\n\nAssistant: c"}, "hh", Reason.PROMPTS_DIFFER),
        ({"chosen": "x" + TALK + " a", "rejected": "x" + TALK + " c"}, "hh", Reason.NO_QUESTION),
        ({"prompt": "q", "responses": ["", None]}, "responses", Reason.EMPTY_ANSWER),
        ({"prompt": "q", "responses": "a"}, "responses", Reason.WRONG_TYPE),
        ({"prompt": "q", "responses": [5]}, "responses", Reason.WRONG_TYPE),
        ({"prompt": "q", "responses": [{"text": "a", "reward": "high"}]}, "responses", Reason.BAD_REWARD),
        ({"prompt": "q", "responses": [{"text": "a", "reward": float("inf")}]}, "responses", Reason.BAD_REWARD),
        ({"responses": ["a"]}, "responses", Reason.MISSING_VALUE),
    ],
)
def test_malformed_records_have_a_named_reason(raw: dict[str, Any], shape: str, reason: Reason) -> None:
    assert problem_of(raw, shape) is reason


def test_unknown_label_and_named_column_of_another_type() -> None:
    assert problem_of(PAIR | {"who": "tie"}, "pairs", columns={"label": "who"}) is Reason.UNKNOWN_LABEL
    assert problem_of(PAIR | {"who": {}}, "pairs", columns={"source": "who"}) is Reason.WRONG_TYPE
    assert row_of(PAIR | {"source": {"a": 1}}).source == "default"


def test_problems_never_repeat_the_text() -> None:
    with pytest.raises(Problem) as caught:
        row_of({"chosen": [{"role": "my secret", "content": "x"}, YES], "rejected": [USER, NO]})
    assert "secret" not in str(caught.value)


def test_wrong_columns_name_those_found_and_what_to_write() -> None:
    with pytest.raises(DataError, match=r"columns found: better, question") as caught:
        choose_shape(config(), [{"question": "q", "better": "a"}], "night.parquet")
    assert "data.columns" in str(caught.value.hint)
    assert "night.parquet" in caught.value.message


def test_a_wrong_name_and_an_empty_column_are_said() -> None:
    with pytest.raises(DataError, match=r"data\.columns\.chosen names `good`"):
        choose_shape(config(columns={"chosen": "good"}), [PAIR], "night.parquet")
    with pytest.raises(DataError, match=r"empty in all rows looked at: chosen"):
        choose_shape(config(), [PAIR | {"chosen": None}], "night.parquet")


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        ({"format": "pairs", "columns": {"prompt": "question"}}, "'question'"),
        ({"format": "hh", "columns": {"chosen": "good"}}, "'good'"),
        ({"columns": {"category": "topic"}}, "'topic'"),
        ({"columns": {"responses": ["a.solution", "b.solution"]}}, "'a.solution', 'b.solution'"),
    ],
)
def test_configured_columns_must_exist(content: dict[str, Any], missing: str) -> None:
    with pytest.raises(DataError, match=missing):
        choose_shape(config(**content), [PAIR], "file")


def test_one_stored_answer_may_be_missing_everywhere() -> None:
    raw = {"prompt": "q", "a": "x"}
    assert choose_shape(config(columns={"responses": ["a", "b"]}), [raw], "file").NAME == "responses"

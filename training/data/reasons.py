"""Why a row is not trained on, and what its owner can do. The names are those in quarantine.parquet and the report."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A bad row goes to quarantine with one of these; its share counts against data.max_quarantine."""

    UNREADABLE_JSON = "unreadable_json"
    NOT_AN_OBJECT = "not_an_object"
    INVALID_UTF8 = "invalid_utf8"
    MISSING_VALUE = "missing_value"
    WRONG_TYPE = "wrong_type"
    EMPTY_PROMPT = "empty_prompt"
    EMPTY_ANSWER = "empty_answer"
    IDENTICAL_SIDES = "identical_sides"
    PROMPTS_DIFFER = "prompts_differ"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    RUNS_INTO_NEXT_TURN = "runs_into_next_turn"
    TURNS_DO_NOT_ALTERNATE = "turns_do_not_alternate"
    UNKNOWN_ROLE = "unknown_role"
    NO_QUESTION = "no_question"
    NUL_BYTE = "nul_byte"
    CONTROL_CHARACTER = "control_character"
    REPLACEMENT_CHARACTER = "replacement_character"
    LONE_SURROGATE = "lone_surrogate"
    PROMPT_TOO_LONG = "prompt_too_long"
    ANSWER_TOO_LONG = "answer_too_long"
    ANSWER_TOO_SHORT = "answer_too_short"
    UNKNOWN_SOURCE = "unknown_source"
    UNKNOWN_LABEL = "unknown_label"
    BAD_LABEL_WEIGHT = "bad_label_weight"
    BAD_REWARD = "bad_reward"
    CONTRADICTING_LABELS = "contradicting_labels"


class Dropped(StrEnum):
    """A sound row that is left out; counted as a warning, never against data.max_quarantine.

    All but those above max_rows stand in quarantine.parquet beside the refused rows.
    """

    EXACT_DUPLICATE = "exact_duplicate"
    NEAR_DUPLICATE = "near_duplicate"
    EVALUATION_OVERLAP = "evaluation_overlap"
    EVALUATION_OVERLAP_NEAR = "evaluation_overlap_near"
    OVER_MAX_ROWS = "over_max_rows"


class Problem(Exception):
    """What is wrong with one row: the reason, and which column or side, never the text itself."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


ADVICE: dict[Reason, str] = {
    Reason.UNREADABLE_JSON: "write one JSON object a line",
    Reason.NOT_AN_OBJECT: 'write one JSON object a line, e.g. {"prompt": ..., "chosen": ..., "rejected": ...}',
    Reason.INVALID_UTF8: "save the file as UTF-8",
    Reason.MISSING_VALUE: "fill the column, or name the right one under data.columns",
    Reason.WRONG_TYPE: "the value must be text or chat messages [{role, content}]; name the shape with data.format",
    Reason.EMPTY_PROMPT: "remove rows without a question",
    Reason.EMPTY_ANSWER: "remove rows in which an answer is empty",
    Reason.IDENTICAL_SIDES: "a pair needs two different answers",
    Reason.PROMPTS_DIFFER: "both sides must answer the same prompt",
    Reason.NO_ASSISTANT_TURN: "each side must end with an assistant turn (HH: after the last `Assistant:` marker)",
    Reason.RUNS_INTO_NEXT_TURN: "cut the answer before the next `Human:` turn",
    Reason.TURNS_DO_NOT_ALTERNATE: "user and assistant turns must alternate",
    Reason.UNKNOWN_ROLE: "roles are system, user, assistant and tool",
    Reason.NO_QUESTION: "a prompt must end with a user (or tool) turn",
    Reason.NUL_BYTE: "remove NUL bytes",
    Reason.CONTROL_CHARACTER: "remove control characters other than newline and tab",
    Reason.REPLACEMENT_CHARACTER: "U+FFFD says that text was decoded wrongly; export it again as UTF-8",
    Reason.LONE_SURROGATE: "half a character; export the text again as UTF-8",
    Reason.PROMPT_TOO_LONG: "shorten it, or raise data.max_prompt_characters",
    Reason.ANSWER_TOO_LONG: "shorten it, or raise data.max_answer_characters",
    Reason.ANSWER_TOO_SHORT: "lower data.min_answer_characters if short answers are fine",
    Reason.UNKNOWN_SOURCE: "add the source to data.allowed_sources, or leave that list empty",
    Reason.UNKNOWN_LABEL: "add the label's value to data.chosen_labels or data.rejected_labels",
    Reason.BAD_LABEL_WEIGHT: "a label weight lies above 0 and is at most 1",
    Reason.BAD_REWARD: "a stored reward is a finite number or true/false",
    Reason.CONTRADICTING_LABELS: "the same pair is labelled both ways round; decide, or remove both",
}

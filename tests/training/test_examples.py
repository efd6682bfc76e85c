"""Rows as tokens: what survives, what is dropped and why, and that nothing is dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.schema.models import ModelsConfig
from tests.training.stages import MODELS, arithmetic_rows
from training.examples import (
    Encoder,
    encode_answers,
    encode_imitation,
    encode_pairs,
    encode_prompts,
    read_split,
)

LONG = "Numbers are so much fun. " * 8


@pytest.fixture(scope="module")
def encoder(base_folder: Path) -> Encoder:
    return Encoder(AutoTokenizer.from_pretrained(base_folder), MODELS)


def row(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "row_id": f"row-{number}",
        "prompt": [{"role": "user", "content": f"What is {number} plus 1?"}],
        "prompt_id": f"prompt-{number}",
        "chosen": "Sure! 1 plus 1 is 2.",
        "rejected": "Ugh. 1 plus 1 is 3.",
        "responses": None,
        "reference": "2",
        "label": "chosen",
        "label_weight": 1.0,
        "source": "unit",
        "category": "plus",
        "partition": "",
    } | changes


def test_a_pair_is_two_answers_to_one_prompt(encoder):
    (pair,), dropped = encode_pairs([row(label_weight=0.5)], encoder)
    assert not dropped
    assert (pair.row_id, pair.weight) == ("row-1", 0.5)
    chosen, rejected = pair.group.responses
    assert chosen == encoder.response("Sure! 1 plus 1 is 2.").token_ids
    assert rejected == encoder.response("Ugh. 1 plus 1 is 3.").token_ids
    assert pair.group.prompt_ids == encoder.prompt(row()).token_ids


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("no_pair", {"rejected": None}), ("no_pair", {"chosen": None, "rejected": None}),
        ("empty_side", {"chosen": ""}), ("empty_side", {"rejected": " \n "}),
        ("equal", {"rejected": "Sure! 1 plus 1 is 2."}),
        ("equal", {"rejected": " Sure! 1 plus 1 is 2. "}),
        ("equal_after_truncation", {"chosen": LONG + "yes", "rejected": LONG + "no"}),
    ],
)  # fmt: skip
def test_a_pair_that_says_nothing_is_dropped_by_reason(encoder, reason: str, changes: dict):
    pairs, dropped = encode_pairs([row(1), row(2, **changes), row(3)], encoder)
    assert [pair.row_id for pair in pairs] == ["row-1", "row-3"]
    assert dict(dropped) == {reason: 1}


def test_a_pair_that_differs_before_the_limit_stays(encoder):
    pairs, dropped = encode_pairs([row(chosen="yes " + LONG, rejected="no " + LONG)], encoder)
    assert len(pairs) == 1
    assert not dropped
    assert all(len(side) == MODELS.max_response_length for side in pairs[0].group.responses)


def test_a_whole_snapshot_is_accounted_for(encoder):
    rows = [r.record() for r in arithmetic_rows()]
    pairs, dropped = encode_pairs(rows, encoder)
    assert len(pairs) + sum(dropped.values()) == len(rows)
    assert len(pairs) > 100


def test_long_prompts_keep_their_end(base_folder: Path):
    short = Encoder(
        AutoTokenizer.from_pretrained(base_folder), ModelsConfig(base="x", max_prompt_length=6, max_response_length=4)
    )
    prompt = short.prompt(row())
    full = Encoder(short.tokenizer, MODELS).prompt(row())
    assert len(prompt.token_ids) == 6
    assert prompt.token_ids[-5:] == full.token_ids[-5:]
    assert not short.response(LONG).finished


def test_a_prompt_carries_what_rules_need(encoder):
    prompt = encoder.prompt(row())
    assert (prompt.prompt_id, prompt.reference, prompt.source, prompt.category) == ("prompt-1", "2", "unit", "plus")
    assert prompt.messages == ({"role": "user", "content": "What is 1 plus 1?"},)


def responses(*rewards: float | None) -> list[dict[str, Any]]:
    return [{"text": f"answer {i}", "source": f"writer-{i}", "reward": reward} for i, reward in enumerate(rewards)]


def test_the_chosen_answer_is_imitated_or_the_best_rewarded(encoder):
    rows = [
        row(1), row(2, chosen=None, responses=responses(0.0, 1.0, None)),
        row(3, chosen=None, responses=responses(None)), row(4, chosen=None), row(5, chosen="  "),
    ]  # fmt: skip
    names, groups = encode_imitation(rows, encoder)
    assert names == ["row-1", "row-2"]
    assert groups[1].responses == (encoder.response("answer 1").token_ids,)


def test_every_stored_answer_is_a_trajectory(encoder):
    found = encode_answers([row(1, responses=responses(0.5, None)), row(2, chosen=None, rejected=" ")], encoder)
    assert [(a.writer, a.reward, a.text) for a in found] == [
        ("chosen", None, "Sure! 1 plus 1 is 2."), ("rejected", None, "Ugh. 1 plus 1 is 3."),
        ("writer-0", 0.5, "answer 0"), ("writer-1", None, "answer 1"),
    ]  # fmt: skip
    assert all(a.response.finished for a in found)


def test_prompts_are_distinct_and_limited(encoder):
    rows = [row(1), row(1), row(2), row(3)]
    assert [p.prompt_id for p in encode_prompts(rows, encoder)] == ["prompt-1", "prompt-2", "prompt-3"]
    assert [p.prompt_id for p in encode_prompts(rows, encoder, 2)] == ["prompt-1", "prompt-2"]
    assert encode_prompts(rows, encoder, 0) == []


def test_splits_are_read_as_rows(snapshot: Path):
    assert [len(read_split(snapshot, name)) for name in ("train", "validation", "evaluation")] == [84, 20, 16]
    assert set(read_split(snapshot, "train")[0]) == set(row())

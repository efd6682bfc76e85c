"""Laws of the one path from text to tokens: special tokens once each, prompts cut left, answers right."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from training.errors import DataError, ModelFolderError
from training.models.tokenize import (
    as_messages,
    decode_response,
    encode_prompt,
    encode_response,
    eos_id,
    pad_id,
    prompt_text,
    uses_template,
)

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 2 plus 3?"}]
FIXTURE_LAWS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=30)


@pytest.fixture(scope="module")
def plain(base_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(base_folder)


@pytest.fixture(scope="module")
def instruct(base_folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_string_is_one_user_message():
    assert as_messages("Hi") == [{"role": "user", "content": "Hi"}]
    assert as_messages(CHAT) == CHAT


def test_the_template_is_used_where_there_is_one(plain, instruct):
    assert (uses_template(plain), uses_template(instruct), uses_template(instruct, "plain")) == (False, True, False)
    assert prompt_text(instruct, CHAT) == "<bos><system>Be kind.<eos><user>What is 2 plus 3?<eos><assistant>"
    expected = "System: Be kind.\nUser: What is 2 plus 3?\nAssistant:"
    assert prompt_text(plain, CHAT) == prompt_text(instruct, CHAT, "plain") == expected
    assert prompt_text(plain, [{"role": "tool", "content": "5"}]) == "Tool: 5\nAssistant:"


def test_bos_stands_once(plain, instruct):
    for tokenizer, template in ((plain, "auto"), (instruct, "auto"), (instruct, "plain")):
        ids = encode_prompt(tokenizer, CHAT, template=template)
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


def test_a_tokenizer_without_bos_gets_none(base_folder):
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    tokenizer.bos_token = None
    assert 1 not in encode_prompt(tokenizer, CHAT)
    full = encode_prompt(tokenizer, CHAT)
    assert encode_prompt(tokenizer, CHAT, 4) == full[-4:]


@FIXTURE_LAWS
@given(text=texts, limit=st.integers(1, 12))
def test_a_prompt_is_cut_from_the_left(plain, text, limit):
    full = encode_prompt(plain, text)
    cut = encode_prompt(plain, text, limit)
    assert len(cut) == min(limit, len(full))
    if limit > 1:
        assert cut[0] == plain.bos_token_id
        assert cut[1:] == full[1:][-(limit - 1) :] or len(full) <= limit
    assert cut[-1] == full[-1]


@FIXTURE_LAWS
@given(text=texts, limit=st.integers(1, 12))
def test_a_response_has_one_eos_or_was_cut(plain, instruct, text, limit):
    for tokenizer in (plain, instruct):
        full, cut = encode_response(tokenizer, text), encode_response(tokenizer, text, limit)
        assert full.finished
        assert full.token_ids[-1] == tokenizer.eos_token_id
        assert full.token_ids.count(tokenizer.eos_token_id) == 1
        assert cut.token_ids == full.token_ids[:limit]
        assert cut.finished == (len(full.token_ids) <= limit)


@FIXTURE_LAWS
@given(text=texts)
def test_text_comes_back(plain, instruct, text):
    for tokenizer in (plain, instruct):
        assert decode_response(tokenizer, encode_response(tokenizer, text).token_ids) == text.strip()


@pytest.mark.parametrize("text", ["end <eos> not yet", "<bos>", "<pad> <eos>"])
def test_special_tokens_written_by_a_user_are_text(plain, instruct, text):
    """Else whoever writes the data ends answers early, and a score is read past an end."""
    special = {plain.bos_token_id, plain.eos_token_id, plain.pad_token_id}
    for tokenizer in (plain, instruct):
        response = encode_response(tokenizer, text)
        assert special.isdisjoint(response.token_ids[:-1])
        assert decode_response(tokenizer, response.token_ids) == text
    assert special.isdisjoint(encode_prompt(plain, text)[1:])


def test_an_answer_reads_like_the_plain_transcript_goes_on(plain):
    """Prompt + answer tokenise as the whole text would: what is sampled and what is stored look alike."""
    prompt, response = encode_prompt(plain, "What is 2 plus 3?"), encode_response(plain, "  Sure! 2 plus 3 is 5. ")
    whole = plain("User: What is 2 plus 3?\nAssistant: Sure! 2 plus 3 is 5.", add_special_tokens=False)["input_ids"]
    assert [*prompt, *response.token_ids] == [plain.bos_token_id, *whole, plain.eos_token_id]


def test_an_empty_prompt_is_refused(instruct):
    bare = AutoTokenizer.from_pretrained(instruct.name_or_path)
    bare.chat_template = "{{ messages[0].content }}"
    with pytest.raises(DataError, match="a prompt has no tokens"):
        encode_prompt(bare, "")


def test_a_tokenizer_without_eos_is_refused():
    with pytest.raises(ModelFolderError, match=r"tokenizer of here has no EOS token(.|\n)*set eos_token"):
        eos_id(SimpleNamespace(eos_token_id=None, name_or_path="here"))


def test_eos_pads_where_there_is_no_pad_token():
    assert pad_id(SimpleNamespace(pad_token_id=None, eos_token_id=2)) == 2
    assert pad_id(SimpleNamespace(pad_token_id=0, eos_token_id=2)) == 0

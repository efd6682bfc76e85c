"""The one path from text to tokens, for training, scoring and serving.

A prompt is a list of chat messages. With a chat template the template is applied once, and the special tokens it
writes are not added again; without one, a plain transcript is written. A response is its text plus one EOS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.errors import DataError, ModelFolderError

Message = Mapping[str, str]
_PLAIN_ROLES = {"user": "User", "assistant": "Assistant", "system": "System"}


@dataclass(frozen=True)
class EncodedResponse:
    """Tokens of a response. `finished` says that the last one is EOS; a response cut at its limit has none."""

    token_ids: tuple[int, ...]
    finished: bool


def as_messages(prompt: str | Sequence[Message]) -> list[dict[str, str]]:
    """A plain string is one user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def uses_template(tokenizer: Any, template: str = "auto") -> bool:
    """Whether prompts go through the tokenizer's own chat template."""
    return template == "auto" and bool(getattr(tokenizer, "chat_template", None))


def prompt_text(tokenizer: Any, prompt: str | Sequence[Message], template: str = "auto") -> str:
    """The text that is tokenised, up to where the answer begins."""
    messages = as_messages(prompt)
    if uses_template(tokenizer, template):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    turns = [f"{_PLAIN_ROLES.get(m['role'], m['role'].capitalize())}: {m['content']}\n" for m in messages]
    return "".join(turns) + "Assistant:"


def encode_prompt(
    tokenizer: Any, prompt: str | Sequence[Message], max_length: int | None = None, template: str = "auto"
) -> list[int]:
    """Tokens of a prompt, cut from the left to `max_length` so that the end, next to the answer, survives."""
    own_template = uses_template(tokenizer, template)  # whose special tokens are meant; those in a transcript are text
    ids = _text_ids(tokenizer, prompt_text(tokenizer, prompt, template), special=own_template)
    bos = tokenizer.bos_token_id
    if bos is not None and not own_template:
        ids = [bos, *ids]
    if max_length is not None and len(ids) > max_length:
        keeps_bos = bos is not None and ids[0] == bos and max_length > 1
        ids = [bos, *ids[-(max_length - 1) :]] if keeps_bos else ids[-max_length:]
    if not ids:
        raise DataError("a prompt has no tokens", "give a non-empty prompt")
    return ids


def encode_response(
    tokenizer: Any, text: str, max_length: int | None = None, template: str = "auto", finished: bool = True
) -> EncodedResponse:
    """Tokens of a response with its EOS; cut from the right to `max_length`, and then without EOS.

    `finished`: whether the writer came to an end. An answer that was cut gets no EOS, as it has none in its own tokens.
    """
    spaced = text if uses_template(tokenizer, template) else f" {text.strip()}"
    ids = _text_ids(tokenizer, spaced, special=False)
    if finished:
        ids = [*ids, eos_id(tokenizer)]
    if max_length is not None and len(ids) > max_length:
        return EncodedResponse(tuple(ids[:max_length]), finished=False)
    return EncodedResponse(tuple(ids), finished)


def _text_ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Tokens of a text. `special`: whether an `<eos>` written in it is one; else data could end answers."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"])


def decode_response(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of a response, without EOS and other special tokens."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True)).strip()


def eos_id(tokenizer: Any) -> int:
    """The one token that ends a response."""
    if tokenizer.eos_token_id is None:
        raise ModelFolderError(
            f"tokenizer of {getattr(tokenizer, 'name_or_path', '?')} has no EOS token",
            "set eos_token in tokenizer_config.json",
        )
    return int(tokenizer.eos_token_id)


def pad_id(tokenizer: Any) -> int:
    """A token for padded slots. Masks decide what counts, so EOS serves where there is no pad token."""
    return int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else eos_id(tokenizer)

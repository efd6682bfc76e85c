"""Stage base: the quickstart's own model, a tiny Llama with a tokenizer trained on the night's texts. No hub needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from configs.schema.models import ModelsConfig
from training.context import StageContext, StageOutcome
from training.examples import read_split
from training.seeding import seeded_init

VOCABULARY = 400
HEAD_WIDTH = 32


def run(context: StageContext) -> StageOutcome:
    """Build tokenizer and untrained model from the snapshot's texts, and write them as a model folder."""
    models_config = context.section("models", ModelsConfig)
    folder = context.output("model")
    shutil.rmtree(folder, ignore_errors=True)
    parameters = build_quickstart_model(
        snapshot_texts(context.input("snapshot")), models_config, context.spec.seed, folder
    )
    return StageOutcome({"model": folder}, {"parameters": float(parameters)}, {})


def snapshot_texts(snapshot: Path) -> Iterator[str]:
    """Every prompt and answer of the training rows."""
    for row in read_split(snapshot, "train"):
        yield "".join(f"User: {message['content']}\n" for message in row["prompt"]) + "Assistant:"
        yield from (f" {text}" for text in (row["chosen"], row["rejected"]) if text)


def build_quickstart_model(texts: Iterable[str], config: ModelsConfig, seed: int, folder: Path) -> int:
    """Write a tiny Llama folder; returns its number of weights. Same texts, settings and seed: same bytes."""
    tokenizer = train_tokenizer(texts)
    width = config.quickstart_hidden_size
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=config.quickstart_layers,
        num_attention_heads=width // HEAD_WIDTH,
        num_key_value_heads=width // HEAD_WIDTH,
        max_position_embeddings=config.max_prompt_length + config.max_response_length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with seeded_init(seed, "quickstart/model"):
        model = LlamaForCausalLM(llama)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(folder), safe_serialization=True)
    tokenizer.save_pretrained(str(folder))
    return int(model.num_parameters())


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose digits stay apart: arithmetic is learnt on digits, not on whole numbers."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )

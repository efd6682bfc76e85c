"""Stage base: the tiny Llama and its tokenizer, made from the snapshot."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.training.stages import (
    MODELS,
    SEED,
)
from training.base import build_quickstart_model, snapshot_texts, train_tokenizer
from training.contract import file_ref
from training.examples import read_split
from training.models.backbone import Backbone

CPU = torch.device("cpu")


class TestBase:
    def test_same_texts_and_seed_give_the_same_bytes(self, snapshot: Path, base_folder: Path, tmp_path: Path):
        build_quickstart_model(snapshot_texts(snapshot), MODELS, SEED, tmp_path / "again")
        assert file_ref(tmp_path / "again").sha256 == file_ref(base_folder).sha256
        build_quickstart_model(snapshot_texts(snapshot), MODELS, SEED + 1, tmp_path / "other")
        assert file_ref(tmp_path / "other").sha256 != file_ref(base_folder).sha256

    def test_sizes_are_the_configs(self, base_folder: Path):
        config = Backbone.load(base_folder, device=CPU).base.config
        assert (config.hidden_size, config.num_hidden_layers) == (32, 2)
        assert config.max_position_embeddings == MODELS.max_prompt_length + MODELS.max_response_length

    def test_the_tokenizer_loses_nothing(self):
        tokenizer = train_tokenizer(["What is 12 plus 30?", "Sure! 12 plus 30 is 42."] * 5)
        for text in ("What is 12 plus 30?", "ümlaut 漢字 \n tab\t", "99999"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert len(tokenizer("4321", add_special_tokens=False)["input_ids"]) == 4, "digits stay apart"

    def test_no_text_of_held_out_rows_trains_the_tokenizer(self, snapshot: Path):
        texts = " ".join(snapshot_texts(snapshot))
        held_out = {row["chosen"] for row in read_split(snapshot, "evaluation")}
        train = {text for row in read_split(snapshot, "train") for text in (row["chosen"], row["rejected"])}
        assert all(text not in texts for text in held_out - train if all(text not in t for t in train))

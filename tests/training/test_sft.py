"""Stage sft on the tiny night: what it writes, what it refuses, what its loss is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.training.snapshots import Run, changed_rows
from tests.training.stages import (
    MODELS,
    SFT,
)
from training.errors import StageError
from training.examples import Encoder, encode_imitation, read_split
from training.models.backbone import Backbone
from training.models.layout import Group
from training.models.network import Network
from training.recorder import metric_series
from training.sft import ImitationTask, negative_log_likelihood, response_nll

CPU = torch.device("cpu")


class TestSft:
    def test_the_best_looked_at_state_is_what_is_written(self, night: Path, snapshot: Path, reference_folder: Path):
        steps, losses = metric_series(night / "sft" / "metrics.jsonl", "validation_loss")
        assert len(steps) == 3
        backbone = Backbone.load(reference_folder, device=CPU)
        groups = encode_imitation(read_split(snapshot, "validation"), Encoder(backbone.tokenizer, MODELS))[1]
        assert negative_log_likelihood(Network(backbone), groups, 500) == pytest.approx(min(losses), rel=1e-5)

    def test_it_learns(self, night: Path):
        _, losses = metric_series(night / "sft" / "metrics.jsonl", "loss")
        assert losses[-1] < losses[0] - 0.5

    def test_an_adapter_is_merged_into_a_plain_folder(self, run: Run, snapshot: Path, base_folder: Path):
        found = run("sft", {"snapshot": snapshot, "base": base_folder}, sft=SFT.model_copy(update={"lora_rank": 4}))
        folder = Path(found.output("model").path)
        assert not list(folder.glob("adapter*"))
        backbone = Backbone.load(folder, device=CPU)
        groups = encode_imitation(read_split(snapshot, "validation"), Encoder(backbone.tokenizer, MODELS))[1]
        loss = negative_log_likelihood(Network(backbone), groups, 500)
        assert loss == pytest.approx(found.metrics["validation_loss"], abs=1e-4)
        assert found.metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)

    def test_the_loss_is_a_token_mean(self, base_folder: Path):
        """Of unequal answers the longer one weighs more; any microbatch of it adds up."""
        backbone = Backbone.load(base_folder, device=CPU)
        groups = [Group((1, 5), ((7, 2),)), Group((1, 9, 9), ((7, 8, 9, 10, 11, 2),))]
        task = ImitationTask(Network(backbone, trains_backbone=True), ["a", "b"], groups, [], 100)
        assert task.count([0, 1]) == 8
        nll = response_nll(task.network, groups, 100)
        whole, metrics = task.loss([0, 1], 8)
        parts = [task.loss([i], 8)[0] for i in (0, 1)]
        assert float(whole.detach()) == pytest.approx(sum(nll) / 8, rel=1e-5)
        assert float(sum(parts).detach()) == pytest.approx(sum(nll) / 8, rel=1e-5)
        assert metrics["loss"].value == pytest.approx(sum(nll) / 8, rel=1e-5)

    def test_nothing_to_imitate_is_an_error(self, run: Run, snapshot: Path, base_folder: Path, tmp_path: Path):
        empty = changed_rows("train", snapshot, tmp_path / "empty", lambda rows: [r | {"chosen": None} for r in rows])
        with pytest.raises(StageError, match="sft: no rows to train on"):
            run("sft", {"snapshot": empty, "base": base_folder})

"""Stage reward: the teacher, Bradley-Terry on pairs, one or several heads on one backbone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from configs.schema.models import ModelsConfig
from configs.schema.supervised import RewardConfig
from training.calibration import MarginReport, accuracy, calibration_json, margin_report, refuse_collapsed
from training.context import StageContext, StageOutcome
from training.contract import write_json
from training.examples import Encoder, Pair, encode_pairs, read_split
from training.metrics import Mean
from training.models.layout import resolve_layout
from training.models.network import Network, ScalarHead
from training.models.reward_model import ADAPTER, RewardDescription, RewardModel, combine_heads, lora_base
from training.models.trained import load_trained
from training.objectives import bradley_terry_loss
from training.pair_task import PairRows
from training.recorder import Told, untold
from training.seeding import numpy_generator
from training.supervised import fit
from training.world import World, current_world


class RewardTask(PairRows):
    """Bradley-Terry for every head, each on its own Poisson bootstrap of the pairs."""

    def __init__(
        self,
        network: Network,
        pairs: Sequence[Pair],
        held_out: Sequence[Pair],
        config: RewardConfig,
        layout: str,
        seed: int,
    ) -> None:
        super().__init__(network, pairs, layout)
        self.config = config
        self.held_out = PairRows(network, held_out, layout)
        self.bootstrap = bootstrap_weights(len(pairs), config.ensemble_size, seed)

    def loss(self, items: Sequence[int], count: float) -> tuple[torch.Tensor, dict[str, Mean]]:
        """Mean over heads of the weighted loss over the global number of pairs."""
        chosen, rejected = self.pair_scores(items)
        labels = torch.tensor([self.pairs[i].weight for i in items], device=chosen.device)
        bootstrap = self.bootstrap[list(items)].to(chosen.device)
        losses = [
            bradley_terry_loss(
                chosen[:, head], rejected[:, head], label_smoothing=self.config.label_smoothing,
                center_coef=self.config.center_coef, weights=labels * bootstrap[:, head], num_pairs=count,
            )
            for head in range(chosen.shape[1])
        ]  # fmt: skip
        loss = torch.stack(losses).mean()
        margins = self._combined(chosen.detach()) - self._combined(rejected.detach())
        return loss, {
            "loss": Mean(float(loss.detach()) * count, float(len(items))),
            "accuracy": Mean(accuracy(margins) * len(items), float(len(items))),
            "margin": Mean(float(margins.double().sum()), float(len(items))),
        }

    def validate(self) -> dict[str, float]:
        """Held-out loss of the plain Bradley-Terry form, accuracy, margin."""
        if not self.held_out.pairs:
            return {}
        report, _ = held_out_report(self._model(), self.held_out.pairs, self.config, self.layout)
        return {
            "validation_loss": report.loss, "validation_accuracy": report.accuracy,
            "validation_margin": report.margin_mean,
        }  # fmt: skip

    def _model(self) -> RewardModel:
        return RewardModel(self.network, describe(self.config, ModelsConfig(base="unused")))

    def _combined(self, scores: torch.Tensor) -> torch.Tensor:
        return combine_heads(scores, self.config.ensemble_aggregate, self.config.uncertainty_penalty)


def bootstrap_weights(pairs: int, heads: int, seed: int) -> torch.Tensor:
    """[P, k] weights: Poisson(1) counts of each pair for each head; all one for a single head."""
    if heads == 1:
        return torch.ones((pairs, 1))
    counts = numpy_generator(seed, "reward/bootstrap").poisson(1.0, size=(pairs, heads))
    return torch.from_numpy(counts.astype(np.float32))


def held_out_report(
    model: RewardModel, pairs: Sequence[Pair], config: RewardConfig, layout: str, told: Told = untold
) -> tuple[MarginReport, torch.Tensor]:
    """Margins' report on pairs, and the scores [P, 2] it is made of."""
    groups = [pair.group for pair in pairs]
    scores = model.scores(groups, config.max_tokens_per_microbatch, layout, told).reshape(-1, 2)
    lengths = torch.tensor([[len(r) for r in group.responses] for group in groups], dtype=torch.float64)
    return margin_report(scores[:, 0], scores[:, 1], lengths.T.reshape(-1)), scores


def describe(config: RewardConfig, models: ModelsConfig, kind: str = "full") -> RewardDescription:
    """The description of a model made under these settings."""
    return RewardDescription(
        kind=kind, heads=config.ensemble_size, aggregate=config.ensemble_aggregate,
        uncertainty_penalty=config.uncertainty_penalty, max_prompt_length=models.max_prompt_length,
        max_response_length=models.max_response_length, chat_template=models.chat_template,
    )  # fmt: skip


def run(context: StageContext) -> StageOutcome:
    """Train the teacher and write it with its head, calibration and score statistics."""
    models, config = context.section("models", ModelsConfig), context.section("reward", RewardConfig)
    world = current_world()
    network = _build_network(context, models, config, world)
    encoder = Encoder(network.backbone.tokenizer, models)
    pairs, dropped = encode_pairs(read_split(context.input("snapshot"), "train"), encoder)
    held_out, unheld = encode_pairs(read_split(context.input("snapshot"), "validation"), encoder)
    held_out = held_out[: config.max_validation_rows]
    if not held_out:
        # Accuracy, calibration and the scale of scores then flatter: they are of pairs that were trained on.
        context.recorder.event("nothing_held_out", pairs=len(pairs), dropped=dict(unheld))
    layout = resolve_layout(models.layout, [pair.group for pair in pairs])
    report = fit(RewardTask(network, pairs, held_out, config, layout, context.spec.seed), config, context, world)
    description = describe(config, models, "lora" if config.lora_rank else "full")
    if config.lora_rank:
        description = RewardDescription(
            **asdict(description) | {"base": lora_base(context.spec.inputs[_base_role(context)], models.teacher_layers)}
        )
    facts = {
        "dropped_pairs": dict(dropped), "held_out_dropped_pairs": dict(unheld), "layout": layout,
        "judged_on": "held-out pairs" if held_out else "training pairs",
    }  # fmt: skip
    return _finish(context, RewardModel(network, description), held_out or pairs, config, facts, report.steps)


def _build_network(context: StageContext, models: ModelsConfig, config: RewardConfig, world: World) -> Network:
    def head(width: int) -> ScalarHead:
        return ScalarHead(width, config.ensemble_size).initialise(context.spec.seed, "reward")

    return load_trained(
        context.input(_base_role(context)), ADAPTER, models, config, context.spec.seed, world,
        num_layers=models.teacher_layers, head=head,
    )  # fmt: skip


def _base_role(context: StageContext) -> str:
    return "teacher_base" if context.has_input("teacher_base") else "reference"


def _finish(
    context: StageContext, model: RewardModel, held_out: Sequence[Pair], config: RewardConfig, facts: dict[str, Any],
    steps: int,
) -> StageOutcome:  # fmt: skip
    layout: str = facts["layout"]
    told = context.recorder.counting("held-out scores", len(held_out))
    report, scores = held_out_report(model, held_out, config, layout, told)
    report = MarginReport(**current_world().broadcast(vars(report)))
    refuse_collapsed(report, config.collapse_loss_gap, context.spec.stage)
    model = model.described(
        score_mean=float(scores.mean()), score_std=max(float(scores.std()), 1e-6),
        temperature=report.temperature, metrics=report.metrics(),
    )  # fmt: skip
    folder, figure = context.output("reward_model"), context.output("calibration.json")
    is_main = current_world().is_main
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
    model.save(folder, write=is_main)
    if is_main:
        write_json(figure, calibration_json((scores[:, 0] - scores[:, 1]).double(), report))
    metrics = report.metrics() | {
        "score_mean": float(scores.mean()),
        "score_std": float(scores.std()),
        "steps": float(steps),
        "dropped_pairs": float(sum(facts["dropped_pairs"].values())),
    }
    facts |= {"parameters": model.num_parameters()}
    return StageOutcome({"reward_model": folder, "calibration": figure}, metrics, facts)

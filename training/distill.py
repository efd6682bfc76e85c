"""Stage distill: a small student learns the teacher's margins and scores, on the pairs and the policy's answers."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from configs.schema.models import ModelsConfig
from configs.schema.supervised import DistillConfig
from training.calibration import MarginReport, margin_report, refuse_collapsed
from training.context import StageContext, StageOutcome
from training.contract import write_json
from training.engines.choose import load_spread
from training.errors import StageError
from training.examples import Encoder, Pair, encode_pairs, encode_prompts, read_split
from training.metrics import Mean
from training.models.backbone import Backbone
from training.models.layout import resolve_layout
from training.models.network import Network, ScalarHead
from training.models.reward_model import ADAPTER, HEAD_FILE, RewardDescription, RewardModel, lora_base
from training.models.sampling import SamplingSettings, sample_responses
from training.models.tokenize import decode_response
from training.models.trained import load_trained
from training.objectives import distill_loss, preference_kl
from training.pair_task import PairRows
from training.runtime import pick_device, pick_dtype
from training.seeding import torch_generator
from training.student_report import compare, refuse_unlike, response_lengths, seconds_to_score
from training.supervised import fit
from training.world import current_world


@dataclass(frozen=True)
class TaughtPairs:
    """Rows with a pair, the student's tokens of it, and the teacher's scores [P, 2].

    `labelled` [P]: the label's weight where a person chose, else 0. `dropped`: labelled rows without a pair that both
    tokenizers can use, by reason.
    """

    pairs: Sequence[Pair]
    teacher: torch.Tensor
    labelled: torch.Tensor
    dropped: Counter[str] = field(default_factory=Counter)

    def with_labels(self) -> TaughtPairs:
        """Only those that a person has labelled: of the others nobody knows which side is better."""
        kept = torch.nonzero(self.labelled > 0).flatten()
        pairs = [self.pairs[i] for i in kept.tolist()]
        return replace(self, pairs=pairs, teacher=self.teacher[kept], labelled=self.labelled[kept])


class DistillTask(PairRows):
    """distill_loss against stored teacher scores; every head of the student learns the same target."""

    def __init__(
        self, network: Network, taught: TaughtPairs, held_out: TaughtPairs, config: DistillConfig, layout: str
    ) -> None:
        super().__init__(network, taught.pairs, layout)
        self.taught, self.held_out, self.config = taught, held_out, config

    def loss(self, items: Sequence[int], count: float) -> tuple[torch.Tensor, dict[str, Mean]]:
        """The weighted sum of the four terms over the global number of pairs."""
        chosen, rejected = self.pair_scores(items)
        chosen, rejected = chosen[:, 0], rejected[:, 0]
        teacher = self.taught.teacher[list(items)].to(chosen.device)
        # Teacher scores are centred over the training rows, so the student's centre is fixed and microbatches add up.
        loss = distill_loss(
            teacher[:, 0], teacher[:, 1], chosen, rejected,
            temperature=self.config.temperature, margin_weight=self.config.margin_weight,
            pointwise_weight=self.config.pointwise_weight, label_weight=self.config.label_weight,
            label_weights=self.taught.labelled[list(items)].to(chosen.device), score_offset=0.0, num_pairs=count,
        )  # fmt: skip
        kl = preference_kl(teacher[:, 0] - teacher[:, 1], (chosen - rejected).detach())
        return loss, {
            "loss": Mean(float(loss.detach()) * count, float(len(items))),
            "student_teacher_kl": Mean(float(kl) * len(items), float(len(items))),
        }

    def validate(self) -> dict[str, float]:
        """Student-teacher KL on held-out pairs: what is kept is the state that agrees best."""
        scores = student_scores(self.network, self.held_out.pairs, self.config.max_tokens_per_microbatch, self.layout)
        teacher = self.held_out.teacher
        kl = preference_kl(teacher[:, 0] - teacher[:, 1], scores[:, 0] - scores[:, 1])
        return {"validation_loss": float(kl), "validation_student_teacher_kl": float(kl)}


def student_scores(network: Network, pairs: Sequence[Pair], budget: int, layout: str) -> torch.Tensor:
    """[P, 2] scores of a one-headed network."""
    description = RewardDescription("lora", 1, "mean", 0.0, 0, 0, "auto")
    groups = [pair.group for pair in pairs]
    return RewardModel(network, description).scores(groups, budget, layout).reshape(-1, 2)


def run(context: StageContext) -> StageOutcome:
    """Let the teacher score everything once, forget it, train the student, compare the two."""
    models, config = context.section("models", ModelsConfig), context.section("distill", DistillConfig)
    snapshot = context.input("snapshot")
    own = _policy_pairs(context, models, config)
    train_rows = read_split(snapshot, "train")
    held_out_rows = read_split(snapshot, "validation")[: config.max_validation_rows]
    teacher = _Teacher(context, models)
    network = _build_student(context, models, config)
    encoder = Encoder(network.backbone.tokenizer, models)
    taught = _taught(train_rows + own, teacher, encoder, config, labelled=len(train_rows))
    held_out_has_pairs = bool(encode_pairs(held_out_rows, encoder)[0])
    held_out = _taught(held_out_rows, teacher, encoder, config) if held_out_has_pairs else taught.with_labels()
    taught, held_out, centre = _centred(taught, held_out)
    layout = resolve_layout(models.layout, [pair.group for pair in taught.pairs])
    teacher_facts = teacher.facts(held_out_rows if held_out_has_pairs else train_rows, layout, config)
    del teacher
    fit(DistillTask(network, taught, held_out, config, layout), config, context, current_world())
    student = RewardModel(network, _description(context, models, config))
    facts = {"layout": layout, "dropped_pairs": dict(taught.dropped), "held_out_dropped_pairs": dict(held_out.dropped)}
    return _finish(context, config, student, held_out, facts, teacher_facts | {"teacher_score_mean": centre})


class _Teacher:
    """The teacher for as long as it is needed: scores by row, from its own tokenizer."""

    def __init__(self, context: StageContext, models: ModelsConfig) -> None:
        device = pick_device()

        def load(place: torch.device) -> Backbone:
            self.model = RewardModel.load(
                context.input("teacher"), device=place, dtype=pick_dtype(models.dtype, device)
            )
            return self.model.network.backbone

        load_spread(load, device, current_world())
        self.model.network.settle()
        self.encoder = Encoder(self.model.network.backbone.tokenizer, models)
        self._recorder = context.recorder

    def scores(self, rows: Sequence[Mapping[str, Any]], config: DistillConfig) -> dict[str, torch.Tensor]:
        """[2] scores by row id."""
        pairs, _ = encode_pairs(rows, self.encoder)
        if not pairs:
            return {}
        groups = [pair.group for pair in pairs]
        layout = resolve_layout("auto", groups)
        told = self._recorder.counting("teacher scores", len(groups))
        scores = self.model.scores(groups, config.max_tokens_per_microbatch, layout, told).reshape(-1, 2)
        return {pair.row_id: score for pair, score in zip(pairs, scores, strict=True)}

    def facts(self, rows: Sequence[Mapping[str, Any]], layout: str, config: DistillConfig) -> dict[str, float]:
        """Parameters, and seconds for these rows, to compare the student with."""
        groups = [pair.group for pair in encode_pairs(rows, self.encoder)[0]]
        told = self._recorder.counting("teacher is timed", len(groups))
        return {
            "teacher_parameters": float(self.model.num_parameters()),
            "teacher_seconds": seconds_to_score(self.model, groups, config.max_tokens_per_microbatch, layout, told),
        }


def _taught(
    rows: Sequence[Mapping[str, Any]],
    teacher: _Teacher,
    encoder: Encoder,
    config: DistillConfig,
    labelled: int | None = None,
) -> TaughtPairs:
    """Pairs that both tokenizers keep. The first `labelled` rows carry a person's label."""
    scores = teacher.scores(rows, config)
    chosen, dropped = encode_pairs(rows[:labelled], encoder)
    own = encode_pairs(rows[labelled:], encoder)[0] if labelled is not None else []
    with_label = {pair.row_id for pair in chosen if pair.row_id in scores}
    pairs = [pair for pair in [*chosen, *own] if pair.row_id in scores]
    dropped["by_the_teachers_tokenizer"] += len(chosen) - len(with_label)
    if not pairs:
        raise StageError(f"distill: none of {len(rows)} rows holds a usable pair", "look at the validation report")
    return TaughtPairs(
        pairs=pairs,
        teacher=torch.stack([scores[pair.row_id] for pair in pairs]),
        labelled=torch.tensor([pair.weight if pair.row_id in with_label else 0.0 for pair in pairs]),
        dropped=+dropped,
    )


def _centred(taught: TaughtPairs, held_out: TaughtPairs) -> tuple[TaughtPairs, TaughtPairs, float]:
    """A reward is defined up to a constant: the student learns scores around zero."""
    centre = float(taught.teacher.double().mean())
    return (
        replace(taught, teacher=taught.teacher - centre),
        replace(held_out, teacher=held_out.teacher - centre),
        centre,
    )


def _policy_pairs(context: StageContext, models: ModelsConfig, config: DistillConfig) -> list[dict[str, Any]]:
    """Unlabelled pairs of the reference policy's own answers: the student must be right where the policy really is."""
    if config.policy_pairs == 0:
        return []
    device = pick_device()
    backbone = Backbone.load(context.input("reference"), device=device, dtype=pick_dtype(models.dtype, device))
    rows = read_split(context.input("snapshot"), "train")
    prompts = encode_prompts(rows, Encoder(backbone.tokenizer, models), config.policy_pairs)
    settings = SamplingSettings(models.max_response_length)
    twice = [prompt.token_ids for prompt in prompts for _ in range(2)]
    draws = torch_generator(context.spec.seed, "distill/policy")
    told = context.recorder.counting("policy answers", len(twice))
    samples = sample_responses(Network(backbone), twice, settings, draws, told, current_world())
    texts = [decode_response(backbone.tokenizer, sample.token_ids) for sample in samples]
    by_id = {row["prompt_id"]: row for row in reversed(rows)}
    return [
        by_id[prompt.prompt_id]
        | {"row_id": f"policy-{i}", "chosen": texts[2 * i], "rejected": texts[2 * i + 1], "label_weight": 1.0}
        | {"finished": (samples[2 * i].finished, samples[2 * i + 1].finished)}
        for i, prompt in enumerate(prompts)
    ]


def _student_role(context: StageContext) -> str:
    return "student_base" if context.has_input("student_base") else "reference"


def _build_student(context: StageContext, models: ModelsConfig, config: DistillConfig) -> Network:
    start = context.input("adapter") if config.lora_rank and context.has_input("adapter") else None

    def head(width: int) -> ScalarHead:
        new = ScalarHead(width).initialise(context.spec.seed, "student")
        return new if start is None else new.read(start / HEAD_FILE)

    return load_trained(
        context.input(_student_role(context)), ADAPTER, models, config, context.spec.seed, current_world(),
        num_layers=models.student_layers, goes_on_from=start, head=head,
    )  # fmt: skip


def _description(context: StageContext, models: ModelsConfig, config: DistillConfig) -> RewardDescription:
    base = lora_base(context.spec.inputs[_student_role(context)], models.student_layers) if config.lora_rank else None
    return RewardDescription(
        "lora" if config.lora_rank else "full", 1, "mean", 0.0, models.max_prompt_length, models.max_response_length,
        models.chat_template, base,
    )  # fmt: skip


def _finish(
    context: StageContext, config: DistillConfig, student: RewardModel, held_out: TaughtPairs, facts: dict[str, Any],
    teacher_facts: Mapping[str, float],
) -> StageOutcome:  # fmt: skip
    layout: str = facts["layout"]
    groups = [pair.group for pair in held_out.pairs]
    told = context.recorder.counting("student scores", len(groups))
    scores = student.scores(groups, config.max_tokens_per_microbatch, layout, told).reshape(-1, 2)
    comparison = current_world().broadcast(compare(held_out.teacher, scores, groups))
    kept = {key: value for key, value in teacher_facts.items() if key != "teacher_seconds"}
    comparison |= kept | {"parameters": float(student.num_parameters())}
    comparison["parameter_ratio"] = comparison["parameters"] / teacher_facts["teacher_parameters"]
    # What a clock says stays out of the files: the same student must have the same digest, or caches miss.
    told = context.recorder.counting("student is timed", len(groups))
    seconds = seconds_to_score(student, groups, config.max_tokens_per_microbatch, layout, told)
    timed = {key: value for key, value in teacher_facts.items() if key not in kept}
    timed["speed_ratio"] = teacher_facts["teacher_seconds"] / max(seconds, 1e-9)
    report = margin_report(scores[:, 0], scores[:, 1], response_lengths(groups))
    report = MarginReport(**current_world().broadcast(vars(report)))
    refuse_unlike(comparison, config)
    refuse_collapsed(report, config.collapse_loss_gap, context.spec.stage)
    student = student.described(
        score_mean=float(scores.mean()), score_std=max(float(scores.std()), 1e-6),
        temperature=report.temperature, metrics=comparison,
    )  # fmt: skip
    folder, file = context.output("reward_model"), context.output("comparison.json")
    is_main = current_world().is_main
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
    student.save(folder, write=is_main)
    if is_main:
        write_json(file, {"comparison": comparison, "student": asdict(report)})
    dropped = {"dropped_pairs": float(sum(facts["dropped_pairs"].values()))}
    return StageOutcome({"reward_model": folder, "comparison": file}, comparison | timed | dropped, facts)

"""Stage evaluate: champion, challenger and reference on the same frozen prompts, seed and rewards, in one job."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.schema.evaluation import EvaluationConfig
from configs.schema.models import ModelsConfig
from configs.schema.supervised import RewardConfig
from training.context import StageContext, StageOutcome
from training.contract import FileRef
from training.data.reasons import Dropped
from training.data.report import ValidationReport
from training.errors import DataError
from training.evaluation.answers import Floats, PolicyAnswers, Respondent
from training.evaluation.report import (
    EvaluationReport,
    MetricBuilder,
    MetricReport,
    ModelDigest,
    PromptOverlap,
    RatioValues,
    SampleAnswer,
    length_buckets,
    slice_members,
    write_report,
)
from training.examples import Prompt, encode_imitation, encode_pairs, encode_prompts, read_split
from training.recorder import Recorder, Told
from training.scoring import FunctionScorer, ModelScorer, Question, Scorer

LEVELS = (0.8, 0.9, 0.95, 0.98, 0.99)
ROLES = ("reference", "champion", "challenger")


def run(context: StageContext) -> StageOutcome:
    """Answer, score, compare; write report.json and answers.parquet."""
    models, reward = context.section("models", ModelsConfig), context.section("reward", RewardConfig)
    config, snapshot = context.section("evaluation", EvaluationConfig), context.input("snapshot")
    refs = context.spec.inputs
    respondent = Respondent(
        refs["reference"], models, config, reward.max_tokens_per_microbatch, context.spec.seed, context.recorder
    )
    prompts = encode_prompts(read_split(snapshot, "evaluation"), respondent.encoder, config.prompts)
    if not prompts:
        raise DataError("evaluate: the snapshot holds no evaluation prompts", "raise data.evaluation_fraction")
    held_out_rows = read_split(snapshot, "validation")
    held_out = encode_imitation(held_out_rows, respondent.encoder)[1][: config.perplexity_rows]
    answers: dict[str, PolicyAnswers] = {}
    for number, role in enumerate(role for role in ROLES if role in refs):
        answers[role] = respondent.answer(role, refs[role], prompts, held_out)
        context.recorder.progress(number + 1, len(ROLES) + 1)
    train = _training_answers(respondent, refs["challenger"], snapshot_prompts(context, respondent, len(prompts)))
    scorers = _scorers(reward, config, models, refs, respondent.encoder.tokenizer)
    train_rewards = _score_all(scorers, answers, prompts, train, context.recorder)
    builder = _builder(config, prompts, context.spec.seed, context.spec.params.get("confidence_levels", ()))
    metrics = _metrics(builder, answers, train_rewards, _pair_points(scorers["reward"], held_out_rows))
    report = _report(context, prompts, answers, metrics, config)
    report_file, answers_file = context.output("report.json"), context.output("answers.parquet")
    write_report(report_file, report)
    pq.write_table(answers_table(prompts, answers), answers_file, compression="zstd")
    values = {metric.name: metric.overall.challenger.value for metric in metrics}
    facts = {"prompts": len(prompts), "champion": "champion" in answers}
    return StageOutcome({"report": report_file, "answers": answers_file}, values, facts)


def snapshot_prompts(context: StageContext, respondent: Respondent, limit: int) -> list[Prompt]:
    """As many training prompts, for the gap between training and held-out reward."""
    return encode_prompts(read_split(context.input("snapshot"), "train"), respondent.encoder, limit)


def _training_answers(respondent: Respondent, challenger: FileRef, prompts: Sequence[Prompt]) -> list[Question]:
    _, groups, _ = respondent.sample(challenger, prompts, "training", "answers to training prompts")
    return [Question(p, tuple(g.responses[0])) for p, g in zip(prompts, groups, strict=True)]


def _scorers(
    reward: RewardConfig, config: EvaluationConfig, models: ModelsConfig, refs: Mapping[str, FileRef], tokenizer: Any
) -> dict[str, Scorer]:
    """Metric name -> who scores. `reward` is what PPO trained on; `gold_reward` the truth, where there is one."""
    budget = reward.max_tokens_per_microbatch
    found: dict[str, Scorer] = {}
    if reward.kind == "function":
        assert reward.function is not None
        found["reward"] = FunctionScorer(reward.function, reward.allowed_functions, tokenizer)
    elif "student" in refs:
        found["reward"] = ModelScorer(refs["student"], models, tokenizer, budget)
        if "teacher" in refs:
            found["teacher_reward"] = ModelScorer(refs["teacher"], models, tokenizer, budget)
    else:
        found["reward"] = ModelScorer(refs["teacher"], models, tokenizer, budget)
    if config.gold_function is not None:
        found["gold_reward"] = FunctionScorer(config.gold_function, reward.allowed_functions, tokenizer)
    return found


def _score_all(
    scorers: Mapping[str, Scorer],
    answers: Mapping[str, PolicyAnswers],
    prompts: Sequence[Prompt],
    train: Sequence[Question],
    recorder: Recorder,
) -> Floats:
    """Fill every policy's rewards; returns the main reward of the challenger's answers to training prompts."""
    for name, scorer in scorers.items():
        for role, found in answers.items():
            questions = [Question(p, ids) for p, ids in zip(prompts, found.token_ids, strict=True)]
            told = recorder.counting(f"{name} of the {role}", len(questions))
            found.rewards[name] = _in_units(scorer, questions, told)
    return _in_units(scorers["reward"], train, recorder.counting("reward on training prompts", len(train)))


def _in_units(scorer: Scorer, questions: Sequence[Question], told: Told) -> Floats:
    """Model scores in standard deviations above held-out answers, so that limits mean the same every night."""
    scores = scorer.scores(questions, told).astype(np.float64)
    return (scores - scorer.mean) / max(scorer.std, 1e-6) if isinstance(scorer, ModelScorer) else scores


def _pair_points(scorer: Scorer, rows: Sequence[Mapping[str, Any]]) -> Floats | None:
    """1, 1/2 or 0 a held-out pair: does the reward model, in its own tokens, order it as the person did?"""
    if not isinstance(scorer, ModelScorer):
        return None
    pairs, _ = encode_pairs(rows, scorer.encoder)
    if not pairs:
        return None
    scores = scorer.model.scores([pair.group for pair in pairs], scorer.budget).reshape(-1, 2).double().numpy()
    points: Floats = 0.5 + 0.5 * np.sign(scores[:, 0] - scores[:, 1])
    return points


def _builder(
    config: EvaluationConfig, prompts: Sequence[Prompt], seed: int, asked_levels: Sequence[float]
) -> MetricBuilder:
    slices = slice_members(
        source=[p.source for p in prompts],
        category=[p.category for p in prompts],
        length=length_buckets([len(p.token_ids) for p in prompts]),
    )
    levels = sorted({*LEVELS, config.confidence, *asked_levels})
    return MetricBuilder(seed=seed, confidence=levels, resamples=config.bootstrap_samples, slices=slices)


def _metrics(
    builder: MetricBuilder, answers: Mapping[str, PolicyAnswers], train_rewards: Floats, pair_points: Floats | None
) -> tuple[MetricReport, ...]:
    challenger = answers["challenger"]
    metrics = [
        builder.mean(name, *_columns(answers, lambda a, name=name: a.rewards[name])) for name in challenger.rewards
    ]
    for opponent in ("champion", "reference"):
        if opponent in answers:
            name = "win_rate" if opponent == "champion" else "win_rate_reference"
            metrics.append(builder.win_rate(name, challenger.rewards["reward"], answers[opponent].rewards["reward"]))
    metrics += [
        builder.ratio("kl_ref", *_columns(answers, lambda a: RatioValues(a.kl_sums, a.lengths)), unit="nats/token"),
        builder.mean("kl_ref_sequence", *_columns(answers, lambda a: a.kl_sums), unit="nats"),
        builder.mean("response_length", *_columns(answers, lambda a: a.lengths), unit="tokens"),
        builder.mean("eos_rate", *_columns(answers, lambda a: a.finished), proportion=True),
        builder.mean("distinct_2", *_columns(answers, lambda a: a.distinct_2)),
        builder.mean("repetition_share", *_columns(answers, lambda a: a.repetition_share)),
        builder.gap("train_validation_gap", train_rewards, challenger.rewards["reward"]),
        _length_ratio(builder, answers),
    ]
    if len(challenger.nll_sums):
        plain = MetricBuilder(seed=builder.seed, confidence=builder.confidence, resamples=builder.resamples)
        losses = _columns(answers, lambda a: RatioValues(a.nll_sums, a.nll_tokens))
        metrics.append(plain.ratio("perplexity", *losses, transform=np.exp))
        if pair_points is not None:
            metrics.append(plain.mean("reward_model_accuracy", pair_points, proportion=True))
    return tuple(metrics)


def _columns(answers: Mapping[str, PolicyAnswers], read: Any) -> list[Any]:
    """(challenger, champion or None, reference)."""
    return [read(answers[role]) if role in answers else None for role in ("challenger", "champion", "reference")]


def _length_ratio(builder: MetricBuilder, answers: Mapping[str, PolicyAnswers]) -> MetricReport:
    """Mean answer length as a multiple of the champion's (the reference's on the first night)."""
    baseline = answers.get("champion", answers["reference"])
    return builder.ratio("length_ratio", RatioValues(answers["challenger"].lengths, baseline.lengths))


def _report(
    context: StageContext, prompts: Sequence[Prompt], answers: Mapping[str, PolicyAnswers],
    metrics: tuple[MetricReport, ...], config: EvaluationConfig,
) -> EvaluationReport:  # fmt: skip
    refs = context.spec.inputs
    digests = {role: ModelDigest(name=role, sha256=found.model.sha256) for role, found in answers.items()}
    judge = refs.get("student") or refs.get("teacher")
    return EvaluationReport(
        night=context.spec.night,
        seed=context.spec.seed,
        prompt_set_digest=hashlib.sha256("\n".join(p.prompt_id for p in prompts).encode()).hexdigest(),
        prompt_count=len(prompts),
        challenger=digests["challenger"],
        champion=digests.get("champion"),
        reference=digests.get("reference"),
        reward_model=ModelDigest(name="reward_model", sha256=judge.sha256) if judge else None,
        overlap=_overlap(context),
        metrics=metrics,
        samples=_samples(prompts, answers, config.sample_answers),
    )


def _overlap(context: StageContext) -> PromptOverlap | None:
    """What the validation removed from training; None where its report is not at hand, as in a watch."""
    if not context.has_input("validation"):
        return None
    dropped = ValidationReport.read(context.input("validation")).dropped
    exact, near = Dropped.EVALUATION_OVERLAP, Dropped.EVALUATION_OVERLAP_NEAR
    return PromptOverlap(exact=dropped.get(exact, 0), near=dropped.get(near, 0))


def _samples(prompts: Sequence[Prompt], answers: Mapping[str, PolicyAnswers], count: int) -> tuple[SampleAnswer, ...]:
    """Evenly from the prompt that lost most against the baseline to the one that won most: bad ones are not hidden."""
    baseline = answers.get("champion", answers["reference"])
    change = answers["challenger"].rewards["reward"] - baseline.rewards["reward"]
    ranked = np.argsort(change, kind="stable")
    picked = ranked[np.unique(np.linspace(0, len(ranked) - 1, min(count, len(ranked))).round().astype(int))]
    return tuple(_sample(prompts[i], answers, i) for i in picked.tolist()) if count else ()


def _sample(prompt: Prompt, answers: Mapping[str, PolicyAnswers], i: int) -> SampleAnswer:
    texts: dict[str, Any] = {role: found.texts[i] for role, found in answers.items()}
    rewards: dict[str, Any] = {f"{role}_reward": float(found.rewards["reward"][i]) for role, found in answers.items()}
    return SampleAnswer(prompt_id=prompt.prompt_id, prompt=shown(prompt), **texts, **rewards)


def shown(prompt: Prompt) -> str:
    """A prompt for readers."""
    if len(prompt.messages) == 1:
        return prompt.messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def answers_table(prompts: Sequence[Prompt], answers: Mapping[str, PolicyAnswers]) -> pa.Table:
    """One row a prompt: the prompt, and each policy's answer, length and rewards."""
    columns: dict[str, list[Any]] = {
        "prompt_id": [p.prompt_id for p in prompts],
        "prompt": [shown(p) for p in prompts],
        "source": [p.source for p in prompts],
        "category": [p.category for p in prompts],
    }
    for role, found in answers.items():
        columns[role] = found.texts
        columns[f"{role}_tokens"] = [int(n) for n in found.lengths]
        for name, values in found.rewards.items():
            columns[f"{role}_{name}"] = values.tolist()
    return pa.table(columns)

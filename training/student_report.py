"""What distillation came to: the student beside its teacher on held-out pairs, and when it must not be used."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from scipy.stats import kendalltau

from configs.schema.supervised import DistillConfig
from training.calibration import margin_report, right_order
from training.errors import StageError
from training.models.layout import Group
from training.models.reward_model import RewardModel
from training.objectives import preference_kl
from training.recorder import Told


def compare(teacher: torch.Tensor, student: torch.Tensor, groups: Sequence[Group]) -> dict[str, float]:
    """Student against teacher on held-out pairs, scores [P, 2] each: KL, rank agreement, margin R^2, accuracy kept."""
    teacher_margins, student_margins = teacher[:, 0] - teacher[:, 1], student[:, 0] - student[:, 1]
    lengths = response_lengths(groups)
    of_teacher = margin_report(teacher[:, 0], teacher[:, 1], lengths)
    of_student = margin_report(student[:, 0], student[:, 1], lengths)
    residual = (teacher_margins - student_margins).double().square().sum()
    spread = (teacher_margins - teacher_margins.mean()).double().square().sum()
    tau = float(kendalltau(teacher.reshape(-1).numpy(), student.reshape(-1).numpy()).statistic)
    retained = of_student.accuracy / of_teacher.accuracy if of_teacher.accuracy > 0 else 0.0
    return {
        "student_teacher_kl": float(preference_kl(teacher_margins, student_margins)),
        "kendall_tau": tau if math.isfinite(tau) else 0.0,  # one side ranks nothing
        "margin_r2": float(1 - residual / spread) if float(spread) > 0 else 0.0,
        "teacher_accuracy": of_teacher.accuracy,
        "accuracy": of_student.accuracy,
        "accuracy_retained": retained,
        "accuracy_retained_high": retained + _half_width(teacher_margins, student_margins, retained),
        "loss": of_student.loss,
        "margin_std": of_student.margin_std,
        "expected_calibration_error": of_student.expected_calibration_error,
    }


def _half_width(teacher_margins: torch.Tensor, student_margins: torch.Tensor, retained: float) -> float:
    """Half of the 95 % interval of the share of accuracy retained: a ratio of means over the same pairs.

    Linearised (Cochran, Sampling Techniques, chapter 6): the pairs' residuals around the ratio, over the lower mean.
    1, which refuses nothing, where fewer than two pairs or none that the teacher gets right tell of no spread.
    """
    of_teacher, of_student = right_order(teacher_margins), right_order(student_margins)
    if len(of_teacher) < 2 or float(of_teacher.mean()) == 0.0:
        return 1.0
    residuals = of_student - retained * of_teacher
    return 1.96 * float(residuals.std() / of_teacher.mean()) / math.sqrt(len(residuals))


def refuse_unlike(comparison: Mapping[str, float], config: DistillConfig) -> None:
    """Raise StageError for a student that does not judge as its teacher does: by KL, or by the accuracy it keeps.

    The accuracy has to be too low for certain: of a few dozen pairs one more or less is chance.
    """
    limit, kl = config.max_student_teacher_kl, comparison["student_teacher_kl"]
    longer = "train the student longer (distill.epochs), give it more rank or layers, or lift distill."
    if limit is not None and not kl < limit:
        raise StageError(
            f"distill: held-out student-teacher KL {kl:.4f} nats is not below {limit}",
            f"{longer}max_student_teacher_kl",
        )
    least, high = config.min_accuracy_retained, comparison["accuracy_retained_high"]
    if least is not None and high < least:
        raise StageError(
            f"distill: the student keeps {comparison['accuracy_retained']:.3f} of its teacher's accuracy (at most "
            f"{high:.3f} with 95 % confidence), less than {least}",
            f"{longer}min_accuracy_retained",
        )


def response_lengths(groups: Sequence[Group]) -> torch.Tensor:
    return torch.tensor([[len(r) for r in g.responses] for g in groups], dtype=torch.float64).T.reshape(-1)


def seconds_to_score(model: RewardModel, groups: Sequence[Group], budget: int, layout: str, told: Told) -> float:
    """Seconds to score these pairs, after one warm-up batch."""
    model.scores(groups[:8], budget, layout)
    started = time.perf_counter()
    model.scores(groups, budget, layout, told)
    return time.perf_counter() - started

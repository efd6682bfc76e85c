"""What a reward model's margins say: accuracy, spread, calibration, length bias, collapse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from training.errors import StageError
from training.objectives import bradley_terry_loss


@dataclass(frozen=True)
class MarginReport:
    """Held-out pairs of one reward model. Margins are chosen minus rejected score, in logits."""

    pairs: int
    loss: float  # mean Bradley-Terry loss of the margins, nats
    calibrated_loss: float  # the same of margins / temperature
    accuracy: float  # ties count half
    tie_rate: float
    margin_mean: float
    margin_std: float
    temperature: float
    expected_calibration_error: float  # of margins / temperature, ten bins of equal width
    length_correlation: float  # Pearson, score against response tokens

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """As step metrics."""
        return {f"{prefix}{name}": float(value) for name, value in vars(self).items()}


def margin_report(chosen: torch.Tensor, rejected: torch.Tensor, lengths: torch.Tensor) -> MarginReport:
    """From scores [P], [P] and response lengths [2P] (all chosen, then all rejected)."""
    margins = (chosen - rejected).double()
    temperature = fit_temperature(margins)
    zeros = torch.zeros_like(margins, dtype=torch.float32)
    scores = torch.cat([chosen, rejected]).double()
    return MarginReport(
        pairs=len(margins),
        loss=float(bradley_terry_loss(margins.float(), zeros)),
        calibrated_loss=float(bradley_terry_loss((margins / temperature).float(), zeros)),
        accuracy=accuracy(margins),
        tie_rate=float((margins == 0).double().mean()),
        margin_mean=float(margins.mean()),
        margin_std=float(margins.std(unbiased=False)),
        temperature=temperature,
        expected_calibration_error=expected_calibration_error(margins / temperature),
        length_correlation=_correlation(scores, lengths.double()),
    )


def accuracy(margins: torch.Tensor) -> float:
    """Share of pairs in the right order; ties are half."""
    return float(right_order(margins).mean())


def right_order(margins: torch.Tensor) -> torch.Tensor:
    """[P] float64: 1 for a pair in the right order, 0.5 for a tie, 0 for one in the wrong order."""
    return (margins > 0).double() + 0.5 * (margins == 0).double()


def fit_temperature(margins: torch.Tensor) -> float:
    """The T in [1/20, 20] for which margins / T have the least Bradley-Terry loss, by golden section on log T.

    One scalar, fitted on held-out pairs (Guo et al. 2017, section 4.2); the loss is convex in 1/T.
    """
    ratio = (math.sqrt(5) - 1) / 2
    low, high = math.log(0.05), math.log(20.0)

    def loss(log_temperature: float) -> float:
        return float(torch.nn.functional.softplus(-margins / math.exp(log_temperature)).mean())

    for _ in range(60):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if loss(a) <= loss(b):
            high = b
        else:
            low = a
    return math.exp((low + high) / 2)


def expected_calibration_error(margins: torch.Tensor, bins: int = 10) -> float:
    """Mean distance of confidence and hit rate over bins of sigmoid(|margin|) in [0.5, 1], weighted by their size."""
    return sum(b["share"] * abs(b["confidence"] - b["hit_rate"]) for b in calibration_bins(margins, bins))


def calibration_bins(margins: torch.Tensor, bins: int = 10) -> list[dict[str, float]]:
    """Per occupied bin: share of pairs, mean confidence, hit rate. What the calibration figure shows."""
    confidence = torch.sigmoid(margins.abs())
    hit = right_order(margins)
    index = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    table = []
    for b in range(bins):
        inside = index == b
        if inside.any():
            table.append(
                {
                    "share": float(inside.double().mean()),
                    "confidence": float(confidence[inside].mean()),
                    "hit_rate": float(hit[inside].mean()),
                }
            )
    return table


def refuse_collapsed(report: MarginReport, gap: float, stage: str) -> None:
    """Raise StageError when the model's margins are worth no more than a coin's, whatever its accuracy says.

    `gap`: the held-out loss must be this far below ln 2, the loss of a coin. It is the loss of the margins as they are:
    a model that is right but far too sure is refused too, since its margins are what PPO and the student are given.
    """
    spread_gone = report.margin_std < 1e-6
    if spread_gone or not report.loss < math.log(2) - gap:
        what = "all margins are equal" if spread_gone else f"held-out loss {report.loss:.4f} is no better than a coin's"
        raise StageError(
            f"{stage}: the reward model collapsed: {what} (accuracy {report.accuracy:.3f} on {report.pairs} pairs)",
            "look for flipped or noisy labels, lower the learning rate, or train longer",
        )


def calibration_json(margins: torch.Tensor, report: MarginReport) -> dict[str, Any]:
    """What the figure needs."""
    return {"bins": calibration_bins(margins / report.temperature), "metrics": report.metrics()}


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return float((a * b).sum()) / scale if scale > 0 else 0.0

"""What margins say, against slow oracles: accuracy, temperature, calibration error, length bias, collapse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from training.calibration import (
    accuracy,
    calibration_bins,
    calibration_json,
    expected_calibration_error,
    fit_temperature,
    margin_report,
    refuse_collapsed,
)
from training.errors import StageError

margins_strategy = st.lists(st.one_of(st.floats(-30, 30), st.just(0.0)), min_size=1, max_size=60)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def noisy_margins(count: int, temperature: float, seed: int = 1) -> torch.Tensor:
    """Margins of a model `temperature` times too sure: P(right) = sigmoid(|m| / temperature)."""
    draws = np.random.default_rng(seed)
    size = np.abs(draws.normal(0, 2, count))
    right = draws.random(count) < special.expit(size)
    return tensor(temperature * np.where(right, size, -size))


@given(margins_strategy)
def test_accuracy_counts_ties_half(values):
    expected = sum(1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in values) / len(values)
    assert accuracy(tensor(values)) == pytest.approx(expected)
    assert accuracy(tensor(values)) + accuracy(-tensor(values)) == pytest.approx(1.0)


@pytest.mark.parametrize("truth", [0.2, 1.0, 4.0])
def test_the_temperature_that_made_the_margins_is_found(truth: float):
    assert fit_temperature(noisy_margins(20_000, truth)) == pytest.approx(truth, rel=0.05)


@settings(deadline=None)
@given(values=margins_strategy, scale=st.floats(0.1, 5))
def test_the_temperature_is_scipys_minimum(values, scale):
    margins = tensor(values) * scale
    assume(float(margins.abs().max()) > 1e-3)

    def loss(log_temperature: float) -> float:
        return float(np.mean(np.logaddexp(0, -margins.numpy() / math.exp(log_temperature))))

    low, high = math.log(0.05), math.log(20.0)
    best = optimize.minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-10}).fun
    found = fit_temperature(margins)
    assert 0.05 <= found <= 20.0
    assert loss(math.log(found)) <= min(best, loss(low), loss(high)) + 1e-7


def oracle_ece(margins: list[float], bins: int = 10) -> float:
    confidence = [1 / (1 + math.exp(-abs(m))) for m in margins]
    total = 0.0
    for b in range(bins):
        low, high = 0.5 + b / (2 * bins), 0.5 + (b + 1) / (2 * bins)
        inside = [i for i, c in enumerate(confidence) if low <= c < high or (b == bins - 1 and c >= high)]
        if inside:
            hits = [1.0 if margins[i] > 0 else 0.5 if margins[i] == 0 else 0.0 for i in inside]
            gap = abs(sum(confidence[i] for i in inside) - sum(hits)) / len(inside)
            total += gap * len(inside) / len(margins)
    return total


@given(st.lists(st.floats(-20, 20).filter(lambda m: abs(m) < 1e-9 or abs(m) > 1e-6), min_size=1, max_size=40))
def test_calibration_error_matches_the_oracle(values):
    edges = [math.log(c / (1 - c)) for c in np.linspace(0.55, 0.95, 9)]
    assume(all(abs(abs(m) - e) > 1e-6 for m in values for e in edges))
    assert expected_calibration_error(tensor(values)) == pytest.approx(oracle_ece(values), abs=1e-9)


def test_a_calibrated_model_has_a_small_error_and_an_oversure_one_a_large():
    assert expected_calibration_error(noisy_margins(20_000, 1.0)) < 0.02
    assert expected_calibration_error(noisy_margins(20_000, 8.0)) > 0.1


def test_bins_hold_everything_once():
    table = calibration_bins(tensor([0.0, 1e9, -1e9, 0.3, -2.0]))
    assert sum(row["share"] for row in table) == pytest.approx(1.0)
    assert all(0.5 <= row["confidence"] <= 1 for row in table)
    assert [row["confidence"] for row in table] == sorted(row["confidence"] for row in table)


def report_of(margins: torch.Tensor):
    return margin_report(margins.float(), torch.zeros(len(margins)), torch.ones(2 * len(margins)))


def test_a_report_by_hand():
    chosen, rejected = torch.tensor([2.0, 1.0, 0.0, 5.0]), torch.tensor([1.0, 2.0, 0.0, 1.0])
    lengths = torch.tensor([4.0, 3.0, 1.0, 9.0, 2.0, 4.0, 2.0, 1.0])
    report = margin_report(chosen, rejected, lengths)
    margins = (chosen - rejected).numpy()
    assert report.pairs == 4
    assert report.loss == pytest.approx(np.logaddexp(0, -margins).mean(), rel=1e-6)
    assert report.accuracy == pytest.approx(2.5 / 4)
    assert report.tie_rate == 0.25
    assert report.margin_mean == pytest.approx(margins.mean())
    assert report.margin_std == pytest.approx(margins.std())
    assert report.calibrated_loss <= report.loss + 1e-7
    scores = torch.cat([chosen, rejected]).numpy()
    assert report.length_correlation == pytest.approx(stats.pearsonr(scores, lengths.numpy()).statistic)
    assert set(report.metrics("validation_")) == {f"validation_{name}" for name in vars(report)}
    assert all(math.isfinite(value) for value in report.metrics().values())


def test_equal_lengths_or_scores_correlate_with_nothing():
    assert report_of(tensor([1.0, -1.0])).length_correlation == 0.0
    flat = margin_report(torch.ones(2), torch.ones(2), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert flat.length_correlation == 0.0


def test_a_constant_shift_of_scores_changes_no_margin_statistic():
    margins = noisy_margins(200, 2.0).float()
    lengths = torch.arange(400.0)
    one = margin_report(margins, torch.zeros(200), lengths)
    other = margin_report(margins + 8, torch.full((200,), 8.0), lengths)
    for name in ("loss", "accuracy", "margin_mean", "margin_std", "temperature", "length_correlation"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-4)


COLLAPSED = {
    "all margins equal": torch.full((50,), 0.7),
    "all ties": torch.zeros(50),
    "a coin": torch.tensor([1.0, -1.0] * 25),
    "the wrong way round": -noisy_margins(300, 1.0),
    "not a number": torch.tensor([1.0, math.nan]),
}


@pytest.mark.parametrize("name", COLLAPSED)
def test_a_collapsed_model_is_refused_whatever_its_accuracy(name: str):
    with pytest.raises(StageError, match=r"reward: the reward model collapsed(.|\n)*flipped or noisy labels"):
        refuse_collapsed(report_of(COLLAPSED[name]), 0.01, "reward")


def test_a_model_that_learnt_passes():
    refuse_collapsed(report_of(noisy_margins(300, 1.0)), 0.01, "reward")


def test_a_model_far_too_sure_is_refused_whatever_its_accuracy():
    """Right in 80 % of pairs, but with such margins that its loss is worse than a coin's: PPO would be given those."""
    margins = tensor([40.0] * 79 + [39.0] + [-40.0] * 20)
    report = report_of(margins)
    assert report.accuracy == 0.8
    assert report.calibrated_loss < 0.6 < math.log(2) < report.loss
    with pytest.raises(StageError, match=r"held-out loss 8\.\d+ is no better than a coin's \(accuracy 0.800"):
        refuse_collapsed(report, 0.01, "reward")


@pytest.mark.parametrize(("loss", "refused"), [(0.684, True), (0.682, False)])
def test_the_limit_is_a_hundredth_below_the_loss_of_a_coin(loss: float, refused: bool):
    """ln 2 - 0.01 = 0.6831."""
    margin = math.log(1 / math.expm1(loss))  # the margin whose loss this is
    report = report_of(tensor([margin - 1e-5, margin + 1e-5]))
    assert report.loss == pytest.approx(loss, abs=1e-5)
    if refused:
        with pytest.raises(StageError, match="collapsed"):
            refuse_collapsed(report, 0.01, "reward")
    else:
        refuse_collapsed(report, 0.01, "reward")


def test_what_the_figure_is_given():
    margins = noisy_margins(100, 2.0)
    found = calibration_json(margins, report_of(margins))
    assert found["metrics"]["pairs"] == 100
    assert found["bins"] == calibration_bins(margins / report_of(margins).temperature)

"""Laws of masked means, variances and whitening."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.objectives import oracles
from tests.training.objectives.cases import LAWS, Bools, bools, close, masks, normal, poisoned, seeds, tensor
from training.objectives import masked_mean, masked_var, masked_whiten


@LAWS
@given(masks(), seeds)
def test_any_mask_agrees_with_the_oracle(mask: Bools, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = poisoned(rng, normal(rng, *mask.shape), mask)
    close(masked_mean(tensor(x), bools(mask)), oracles.masked_mean(x, mask))
    close(masked_var(tensor(x), bools(mask)), oracles.masked_var(x, mask))
    for shift_mean in (True, False):
        close(masked_whiten(tensor(x), bools(mask), shift_mean), oracles.masked_whiten(x, mask, shift_mean))


@LAWS
@given(masks(), seeds)
def test_gradients_are_finite_and_zero_where_masked(mask: Bools, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for statistic in (masked_mean, masked_var, masked_whiten):
        leaf = tensor(poisoned(rng, normal(rng, *mask.shape), mask), requires_grad=True)
        statistic(leaf, bools(mask)).square().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        assert (leaf.grad[bools(~mask)] == 0).all()


@LAWS
@given(st.integers(6, 40), seeds)  # two numbers may lie so close that the 1e-8 shows
def test_whitening_gives_mean_zero_and_unit_variance(n: int, seed: int) -> None:
    x = tensor(normal(np.random.default_rng(seed), n, scale=3.0) + 7.0)
    everything = torch.ones(n, dtype=torch.bool)
    white = masked_whiten(x, everything)
    close(masked_mean(white, everything), 0.0, atol=1e-5)
    close(masked_var(white, everything), 1.0, rtol=1e-4)
    # affine maps of the input do not show, except for a sign
    close(masked_whiten(-2.0 * x + 5.0, everything), -white.double().numpy(), atol=1e-4)


@LAWS
@given(masks(), seeds)
def test_order_and_padding_do_not_matter(mask: Bools, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = normal(rng, *mask.shape)
    shuffle = rng.permutation(x.size)
    columns = np.full((mask.shape[0], 2), np.nan)
    padded, padded_mask = np.hstack([columns, x, columns]), np.pad(mask, ((0, 0), (2, 2)))
    for statistic in (masked_mean, masked_var):
        reference = float(statistic(tensor(x), bools(mask)))
        close(statistic(tensor(x.ravel()[shuffle]), bools(mask.ravel()[shuffle])), reference)
        close(statistic(tensor(padded), bools(padded_mask)), reference)


@LAWS
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 300))
def test_a_constant_batch_whitens_to_zero(value: float, n: int) -> None:
    """One rounding error in the mean, divided by sqrt(1e-8), would be of the order of 1 for values around 1000."""
    x, everything = torch.full((n,), value), torch.ones(n, dtype=torch.bool)
    close(masked_whiten(x, everything), np.zeros(n), atol=1e-3)
    close(masked_whiten(x, everything, shift_mean=False), np.full(n, value), rtol=1e-6, atol=1e-3)


def test_variance_survives_a_large_offset() -> None:
    """A one-pass E[x^2] - E[x]^2 in float32 is all rounding here."""
    x = normal(np.random.default_rng(0), 500) + 1e4
    x = x.astype(np.float32).astype(np.float64)
    close(masked_var(tensor(x), torch.ones(500, dtype=torch.bool)), x.var(ddof=1), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_gives_float32(dtype: torch.dtype) -> None:
    x = torch.arange(1.0, 2001.0).to(dtype)
    everything = torch.ones(2000, dtype=torch.bool)
    close(masked_mean(x, everything), float(x.double().mean()), rtol=1e-6)
    close(masked_var(x, everything), float(x.double().var()), rtol=1e-6)
    assert masked_whiten(x, everything).dtype == torch.float32


def test_counts_can_be_averaged() -> None:
    close(masked_mean(torch.tensor([1, 0, 5]), torch.tensor([True, True, False])), 0.5)


def test_nothing_participates() -> None:
    x = torch.full((2, 3), torch.nan, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    close(masked_mean(x, nothing), 0.0)
    close(masked_mean(x, nothing, dim=1), [0.0, 0.0])
    close(masked_var(x, nothing), 0.0)
    close(masked_whiten(x, nothing, shift_mean=False), np.zeros((2, 3)))
    close(masked_mean(torch.zeros(0), torch.zeros(0, dtype=torch.bool)), 0.0)


def test_one_participant_has_no_variance() -> None:
    x, one = torch.tensor([3.0, torch.nan]), torch.tensor([True, False])
    close(masked_var(x, one), 0.0)
    close(masked_var(x, one, unbiased=False), 0.0)
    close(masked_whiten(x, one), [0.0, 0.0])
    close(masked_whiten(x, one, shift_mean=False), [3.0, 0.0])


def test_means_over_chosen_axes() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    some = x % 3 != 0
    some[0, 0] = False
    whole = masked_mean(x, some, dim=(1, 2))
    assert whole.shape == (2,)
    close(whole[1], float(x[1][some[1]].mean()))
    close(masked_mean(x, some, dim=-1)[0, 0], 0.0)


def test_wrong_inputs_are_refused() -> None:
    x = torch.zeros(2, 3)
    for statistic in (masked_mean, masked_var, masked_whiten):
        with pytest.raises(TypeError, match="mask must be bool"):
            statistic(x, torch.ones(2, 3))
        with pytest.raises(ValueError, match=r"mask has shape \(3,\), x has \(2, 3\)"):
            statistic(x, torch.ones(3, dtype=torch.bool))
        with pytest.raises(TypeError, match="real"):
            statistic(x.to(torch.complex64), torch.ones(2, 3, dtype=torch.bool))

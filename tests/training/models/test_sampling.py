"""Laws of sampling: what is recorded is what was drawn from, and only prompt and numbers decide an answer."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from training.models.backbone import Backbone
from training.models.network import Network
from training.models.sampling import Sample, SamplingSettings, draw, sample_responses
from training.seeding import seeded_init, torch_generator

EOS, VOCABULARY = 2, 6
PROMPTS = [(1, 9, 30), (1, 40), (1, 7, 7, 7, 21, 90), (1, 9, 30), (1, 55, 60, 61)]
EVERY_KIND = [
    SamplingSettings(8), SamplingSettings(8, temperature=0.6), SamplingSettings(8, top_p=0.5),
    SamplingSettings(8, top_k=5), SamplingSettings(8, temperature=1.7, top_p=0.8, top_k=20),
]  # fmt: skip


def oracle_log_probs(logits: np.ndarray, wanted: SamplingSettings) -> np.ndarray:
    """log of the distribution of one row of logits, [V], in float64: temperature, then top-k, then the nucleus."""
    scaled = logits.astype(np.float64) / wanted.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[: wanted.top_k] if wanted.top_k else order
    mass = np.exp(scaled[kept] - scaled[kept].max())
    mass /= mass.sum()
    before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
    kept, mass = kept[before < wanted.top_p], mass[before < wanted.top_p]
    found = np.full(len(logits), -np.inf)
    found[kept] = np.log(mass / mass.sum())
    return found


@torch.no_grad()
def forward(network: Network, ids: tuple[int, ...]) -> np.ndarray:
    """[T, V] logits of one sequence, asked the plain way."""
    with network.backbone.reading(network.adapter):
        return network.backbone.base(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().numpy()


def sample(network: Network, prompts, wanted: SamplingSettings, seed: int = 3) -> list[Sample]:
    return sample_responses(network, prompts, wanted, torch_generator(seed, "test"))


@pytest.fixture(scope="module")
def toy_network() -> Network:
    """A Llama with a vocabulary of six tokens, far from uniform."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    with seeded_init(1, "toy"):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        model.lm_head.weight.mul_(20.0)
    return Network(Backbone(model, SimpleNamespace(eos_token_id=EOS, pad_token_id=None), Path("toy")))


@pytest.mark.parametrize("wanted", EVERY_KIND)
def test_recorded_log_probs_are_those_of_the_distribution_drawn_from(stirred_network, wanted):
    for prompt, answer in zip(PROMPTS, sample(stirred_network, PROMPTS, wanted), strict=True):
        logits = forward(stirred_network, (*prompt, *answer.token_ids))
        expected = [
            oracle_log_probs(logits[len(prompt) - 1 + r], wanted)[token] for r, token in enumerate(answer.token_ids)
        ]
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(answer.log_probs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("wanted", [SamplingSettings(8, batch_size=n, top_p=0.9) for n in (1, 2, 3)])
def test_the_batch_size_does_not_matter(stirred_network, wanted):
    together = sample(stirred_network, PROMPTS, SamplingSettings(8, batch_size=128, top_p=0.9))
    for one, other in zip(together, sample(stirred_network, PROMPTS, wanted), strict=True):
        assert one.token_ids == other.token_ids
        assert one.finished == other.finished
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5, rtol=0)


def test_neighbours_do_not_matter(stirred_network):
    wanted = SamplingSettings(8)
    here = sample(stirred_network, PROMPTS, wanted)
    strangers = [PROMPTS[0], (1,) * 20, (3, 3), PROMPTS[3], (1, 80)]
    there = sample(stirred_network, strangers, wanted)
    for i in (0, 3):
        assert here[i].token_ids == there[i].token_ids
        np.testing.assert_allclose(here[i].log_probs, there[i].log_probs, atol=1e-5, rtol=0)


def test_prompts_of_any_length_stand_at_their_own_positions():
    """With learned positions, padding on the left must not move a prompt; rotary ones would not show it."""
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    with seeded_init(1, "absolute"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape)).eval().requires_grad_(False)
    model.transformer.wpe.weight.mul_(50.0)
    network = Network(Backbone(model, SimpleNamespace(eos_token_id=EOS, pad_token_id=0), Path("toy")))
    prompts = [(1, 3), (1, 3, 4, 5, 1, 3, 4, 5), (5, 4, 3)]
    together = sample(network, prompts, SamplingSettings(6))
    alone = sample(network, prompts, SamplingSettings(6, batch_size=1))
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5, rtol=0)


def test_the_same_prompt_twice_gets_answers_of_its_own(stirred_network):
    found = sample(stirred_network, PROMPTS, SamplingSettings(8))
    assert found[0].token_ids != found[3].token_ids


def test_a_seed_decides_the_answers(stirred_network):
    wanted = SamplingSettings(8)
    assert sample(stirred_network, PROMPTS, wanted, seed=4) == sample(stirred_network, PROMPTS, wanted, seed=4)
    assert sample(stirred_network, PROMPTS, wanted, seed=4) != sample(stirred_network, PROMPTS, wanted, seed=5)
    state = torch.get_rng_state()
    sample(stirred_network, PROMPTS, wanted)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"


def test_greedy_takes_the_likeliest_token(stirred_network):
    found = sample(stirred_network, PROMPTS, SamplingSettings(6, temperature=0))
    for prompt, answer in zip(PROMPTS, found, strict=True):
        best = forward(stirred_network, (*prompt, *answer.token_ids)).argmax(axis=-1)[len(prompt) - 1 : -1]
        assert answer.token_ids == tuple(best.tolist())
        assert answer.log_probs == (0.0,) * len(answer.token_ids)


def test_an_answer_ends_at_eos_or_at_the_limit(toy_network):
    found = sample(toy_network, [(1, 3)] * 300, SamplingSettings(5, batch_size=64))
    assert {answer.finished for answer in found} == {True, False}
    for answer in found:
        assert EOS not in answer.token_ids[:-1]
        assert answer.finished == (answer.token_ids[-1] == EOS)
        assert answer.finished or len(answer.token_ids) == 5
        assert len(answer.log_probs) == len(answer.token_ids)


def test_no_prompts_no_answers(toy_network):
    assert sample(toy_network, [], SamplingSettings(5)) == []


@pytest.mark.parametrize(
    "wanted", [SamplingSettings(2, batch_size=512), SamplingSettings(2, 1.5, top_p=0.95, top_k=4, batch_size=512)]
)
def test_frequencies_are_those_of_the_exact_distribution(toy_network, wanted):
    """Chi-square over every answer of at most two tokens."""
    prompt, count = (1, 4), 6_000
    exact: dict[tuple[int, ...], float] = {}
    first = oracle_log_probs(forward(toy_network, prompt)[-1], wanted)
    exact[(EOS,)] = float(np.exp(first[EOS]))
    for token in set(range(VOCABULARY)) - {EOS}:
        second = oracle_log_probs(forward(toy_network, (*prompt, token))[-1], wanted)
        exact |= {(token, after): float(np.exp(first[token] + second[after])) for after in range(VOCABULARY)}
    assert abs(sum(exact.values()) - 1) < 1e-9
    seen = dict.fromkeys(exact, 0)
    for answer in sample(toy_network, [prompt] * count, wanted):
        seen[answer.token_ids] += 1
    assert all(seen[key] == 0 for key, share in exact.items() if share == 0)
    likely = [key for key, share in exact.items() if share * count >= 5]
    rare = sum(share for key, share in exact.items() if key not in likely)
    observed = [seen[key] for key in likely] + [count - sum(seen[key] for key in likely)]
    expected = [exact[key] * count for key in likely] + [rare * count]
    if expected[-1] < 1e-6:
        observed, expected = observed[:-1], expected[:-1]
    assert len(expected) > 5
    assert stats.chisquare(observed, expected).pvalue > 1e-4


logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=8)
uniforms = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, float(np.nextafter(1.0, 0.0))]))


@settings(deadline=None, max_examples=300)
@given(
    logits=logit_rows, uniform=uniforms, temperature=st.sampled_from([0.1, 1.0, 2.0]),
    top_p=st.floats(0.05, 1.0), top_k=st.integers(0, 9),
)  # fmt: skip
def test_no_number_draws_an_excluded_token(logits, uniform, temperature, top_p, top_k):
    wanted = SamplingSettings(1, temperature, top_p, top_k)
    token, log_prob = draw(torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64), wanted)
    assert np.isfinite(float(log_prob))
    kept = [i for i in range(len(logits)) if top_k == 0 or sum(other > logits[i] for other in logits) < top_k]
    assert int(token) in kept


def test_the_largest_number_below_one_stays_inside_the_nucleus():
    """Rounding must not push the draw past the last token that has mass."""
    largest = float(np.nextafter(1.0, 0.0))
    generator = torch_generator(1, "edge")
    logits = torch.randn((4_000, 7), generator=generator) * 3
    logits[:, -1] = -40.0  # never in the nucleus
    numbers = torch.full((4_000,), largest, dtype=torch.float64)
    _, log_probs = draw(logits, numbers, SamplingSettings(1, top_p=0.7))
    assert torch.isfinite(log_probs).all()


def test_inverse_transform_is_monotone_and_exact():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    for (uniform, token), top_k in itertools.product([(0.0, 0), (0.49, 0), (0.51, 1), (0.76, 2), (0.99, 2)], [0]):
        drawn, log_prob = draw(logits, torch.tensor([uniform], dtype=torch.float64), SamplingSettings(1, top_k=top_k))
        assert int(drawn) == token
        assert float(log_prob) == pytest.approx(np.log([0.5, 0.25, 0.25][token]), abs=1e-6)

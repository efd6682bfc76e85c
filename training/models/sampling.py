"""Sampling answers with a seeded generator, and the log-probs of the distribution that was really sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from training.models.backbone import Backbone
from training.models.network import Network
from training.models.tokenize import eos_id, pad_id
from training.recorder import Told, above, untold
from training.world import World

ALONE = World()


@dataclass(frozen=True)
class SamplingSettings:
    """temperature 0 is greedy; top_p 1 and top_k 0 are off; lengths in tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 128


@dataclass(frozen=True)
class Sample:
    """One answer: its tokens (EOS included when `finished`) and the log-prob each was drawn with, in nats."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finished: bool


@torch.no_grad()
def sample_responses(
    network: Network,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    generator: torch.Generator,
    told: Told = untold,
    world: World = ALONE,
) -> list[Sample]:
    """One answer a prompt, in the order given. Repeat a prompt to get several answers. `told` counts answers.

    Each rank of `world` draws all of them, and the main rank's are everybody's: where devices differ in a bit, a draw
    may fall on another token. The uniform numbers are drawn for all prompts at once, so that the answer to a prompt
    does not depend on the batch size nor on how long its neighbours' answers are.
    """
    uniforms = torch.rand((len(prompts), settings.max_new_tokens), generator=generator, dtype=torch.float64)
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    samples: list[Sample | None] = [None] * len(prompts)
    with network.backbone.whole():
        for start in range(0, len(order), settings.batch_size):
            rows = order[start : start + settings.batch_size]
            batch = _sample_batch(network, [prompts[i] for i in rows], uniforms[rows], settings, above(told, start))
            for i, sample in zip(rows, batch, strict=True):
                samples[i] = sample
            told(start + len(rows))
    drawn = world.broadcast([(s.token_ids, s.log_probs, s.finished) for s in samples if s is not None])
    return [Sample(tuple(tokens), tuple(log_probs), finished) for tokens, log_probs, finished in drawn]


def _sample_batch(
    network: Network,
    prompts: Sequence[Sequence[int]],
    uniforms: torch.Tensor,
    settings: SamplingSettings,
    told: Told = untold,
) -> list[Sample]:
    backbone, device = network.backbone, network.backbone.device
    stop = eos_id(backbone.tokenizer)
    input_ids, attention = _left_padded(prompts, pad_id(backbone.tokenizer))
    input_ids, attention = input_ids.to(device), attention.to(device)
    cache = DynamicCache(config=backbone.base.config)
    tokens: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    position_ids = (attention.cumsum(dim=1) - 1).clamp(min=0)
    with backbone.reading(network.adapter):
        for step in range(settings.max_new_tokens):
            logits = _next_logits(backbone, input_ids, attention, position_ids, cache)
            chosen, chosen_log_probs = draw(logits.float(), uniforms[active, step].to(device), settings)
            for i, token, log_prob in zip(active, chosen.tolist(), chosen_log_probs.tolist(), strict=True):
                tokens[i].append(token)
                log_probs[i].append(log_prob)
            going = [j for j, i in enumerate(active) if tokens[i][-1] != stop]
            if not going:
                break
            if len(going) < len(active):
                told(len(prompts) - len(going))
                kept = torch.tensor(going, device=device)
                active = [active[j] for j in going]
                cache.batch_select_indices(kept)
                attention, position_ids, chosen = attention[kept], position_ids[kept], chosen[kept]
            input_ids = chosen[:, None]
            attention = torch.cat([attention, attention.new_ones((len(active), 1))], dim=1)
            position_ids = position_ids[:, -1:] + 1
    return [Sample(tuple(t), tuple(p), t[-1] == stop) for t, p in zip(tokens, log_probs, strict=True)]


def _next_logits(
    backbone: Backbone, input_ids: torch.Tensor, attention: torch.Tensor, position_ids: torch.Tensor,
    cache: DynamicCache,
) -> torch.Tensor:  # fmt: skip
    """Logits of the token to come, [B, V]; the cache grows by what was read."""

    def read() -> torch.Tensor:
        logits: torch.Tensor = backbone.base(
            input_ids=input_ids, attention_mask=attention, position_ids=position_ids, past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        ).logits  # fmt: skip
        return logits[:, -1]

    return backbone.read(read)


def draw(logits: torch.Tensor, uniforms: torch.Tensor, settings: SamplingSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] by inverse transform of `uniforms` [B], and their log-probs in the distribution drawn from.

    Greedy drawing is a point mass: its log-probs are 0.
    """
    if settings.temperature == 0:
        best = logits.argmax(dim=-1)
        return best, torch.zeros_like(best, dtype=torch.float32)
    log_probs = torch.log_softmax(_restrict(logits / settings.temperature, settings), dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return chosen, log_probs.gather(-1, chosen[:, None]).squeeze(-1)


def _restrict(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Apply top-k and nucleus limits: excluded tokens get -inf."""
    if settings.top_k > 0:
        kth = logits.topk(min(settings.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if settings.top_p < 1:
        ranked, order = logits.sort(dim=-1, descending=True)
        mass_before = ranked.softmax(dim=-1).cumsum(dim=-1) - ranked.softmax(dim=-1)
        excluded = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, mass_before >= settings.top_p)
        logits = logits.masked_fill(excluded, -torch.inf)
    return logits


def _left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), length), pad, dtype=torch.int64)
    attention = torch.zeros((len(prompts), length), dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        input_ids[i, length - len(prompt) :] = torch.tensor(list(prompt))
        attention[i, length - len(prompt) :] = 1
    return input_ids, attention

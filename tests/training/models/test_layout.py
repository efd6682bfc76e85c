"""Laws of layouts: however answers lie in a tensor, the numbers are the same; a microbatch never exceeds its budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.errors import DataError
from training.models.batching import microbatches
from training.models.layout import Group, build_layout, group_sizes, resolve_layout
from training.models.network import Network

VOCABULARY = 300
EOS = 2
TOLERANCE = 1e-5
FORWARD_LAWS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

tokens = st.integers(0, VOCABULARY - 1)
KINDS = st.sampled_from(["padded", "shared", "packed"])

group_strategy = st.builds(
    Group,
    st.lists(tokens, min_size=1, max_size=9).map(tuple),
    st.lists(st.lists(tokens, min_size=1, max_size=7).map(tuple), min_size=1, max_size=3).map(tuple),
)
groups_strategy = st.lists(group_strategy, min_size=1, max_size=4)


@torch.no_grad()
def read(network: Network, critic: Network, groups: list[Group], kind: str, pad: int) -> list[dict[str, torch.Tensor]]:
    """Per response: log-probs [r], values [r], scores [k]."""
    layout = build_layout(groups, kind, pad)
    log_probs, values, scores = network.log_probs(layout), critic.values(layout), network.scores(layout)
    for masked in (log_probs, values):
        assert (masked[~layout.response_mask] == 0).all()
    found, b = [], 0
    for group in groups:
        for response in group.responses:
            size = len(response)
            found.append({"log_probs": log_probs[b, :size], "values": values[b, :size], "scores": scores[b]})
            b += 1
    return found


def assert_same(first: list[dict[str, torch.Tensor]], second: list[dict[str, torch.Tensor]]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for name, value in one.items():
            assert value.shape == other[name].shape
            assert float((value - other[name]).abs().max()) <= TOLERANCE, name


@FORWARD_LAWS
@given(groups=groups_strategy, pad=st.sampled_from([0, EOS, VOCABULARY - 1]))
def test_all_layouts_give_the_same_numbers(stirred_network, critic_network, groups, pad):
    padded = read(stirred_network, critic_network, groups, "padded", pad)
    for kind in ("shared", "packed"):
        assert_same(padded, read(stirred_network, critic_network, groups, kind, pad))


@FORWARD_LAWS
@given(groups=groups_strategy, kind=KINDS)
def test_neighbours_and_padding_do_not_matter(stirred_network, critic_network, groups, kind):
    alone = [found for group in groups for found in read(stirred_network, critic_network, [group], kind, pad=0)]
    assert_same(alone, read(stirred_network, critic_network, groups, kind, pad=EOS))


@FORWARD_LAWS
@given(groups=groups_strategy, kind=KINDS, data=st.data())
def test_the_order_of_rows_does_not_matter(stirred_network, critic_network, groups, kind, data):
    order = data.draw(st.permutations(range(len(groups))))
    offsets = [sum(len(g.responses) for g in groups[:i]) for i in range(len(groups))]
    expected = read(stirred_network, critic_network, groups, kind, pad=0)
    shuffled = read(stirred_network, critic_network, [groups[i] for i in order], kind, pad=0)
    back = [expected[offsets[i] + j] for i in order for j in range(len(groups[i].responses))]
    assert_same(back, shuffled)


def test_the_pad_token_inside_a_response_counts(stirred_network, critic_network):
    """pad id == eos id is common: a response made of that token is a response."""
    group = Group((5, 9, EOS, 7), ((EOS, EOS), (EOS,), (4, EOS, EOS, EOS)))
    long = Group((1,) * 12, ((3,) * 9,))
    for kind in ("padded", "shared", "packed"):
        alone = read(stirred_network, critic_network, [group], kind, pad=0)
        assert_same(alone, read(stirred_network, critic_network, [group, long], kind, pad=EOS)[:3])
    assert not torch.allclose(alone[0]["scores"], alone[1]["scores"])


def test_numbers_match_the_network_asked_the_plain_way(stirred_network):
    """One row, no layout at all: log-softmax of the whole forward."""
    backbone, group = stirred_network.backbone, Group((5, 9, 11), ((7, 8, EOS),))
    ids = torch.tensor([[*group.prompt_ids, *group.responses[0]]])
    with torch.no_grad(), backbone.reading("first"):
        plain = backbone.base(input_ids=ids).logits.double().log_softmax(dim=-1)[0]
        found = stirred_network.log_probs(build_layout([group], "padded", 0))[0]
    expected = torch.stack([plain[2 + r, token] for r, token in enumerate(group.responses[0])])
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE, rtol=0)


def test_values_see_the_state_before_each_token(stirred_network, critic_network):
    """V(s_r) does not change when token r changes, and does when token r - 1 does."""

    def values(*response: int) -> torch.Tensor:
        with torch.no_grad():
            return critic_network.values(build_layout([Group((5, 9), (response,))], "padded", 0))[0]

    base, last, first = values(7, 8, 9), values(7, 8, 30), values(40, 8, 9)
    torch.testing.assert_close(base, last, atol=1e-6, rtol=0)
    torch.testing.assert_close(base[0], first[0], atol=1e-6, rtol=0)
    assert (base[1:] - first[1:]).abs().min() > 1e-5


def test_layout_tensors_say_where_responses_lie():
    layout = build_layout([Group((5, 6), ((7, 2), (8, 9, 2)))], "shared", 0)
    assert layout.input_ids.tolist() == [[5, 6, 7, 2, 8, 9, 2]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4]]
    assert layout.row.tolist() == [0, 0]
    assert layout.positions.tolist() == [[1, 2, 3, 0], [1, 4, 5, 6]]
    assert layout.response_ids.tolist() == [[7, 2, 0], [8, 9, 2]]
    assert layout.response_mask.tolist() == [[True, True, False], [True, True, True]]
    assert layout.num_tokens == 7
    assert layout.attention is not None
    allowed = layout.attention[0, 0] == 0
    # the second answer sees the prompt and itself, never its sibling
    assert allowed[5].tolist() == [True, True, False, False, True, True, False]


def test_packed_rows_hold_whole_sequences_that_do_not_see_one_another():
    """Lengths 5, 2, 3: the second and third share a row of five; the order of responses is the groups'."""
    groups = [Group((5, 6), ((7, 8, 2),)), Group((9,), ((2,), (4, 2)))]
    layout = build_layout(groups, "packed", 0)
    assert layout.input_ids.tolist() == [[5, 6, 7, 8, 2], [9, 2, 9, 4, 2]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    assert layout.row.tolist() == [0, 1, 1]
    assert layout.positions.tolist() == [[1, 2, 3, 4], [0, 1, 0, 0], [2, 3, 4, 0]]
    assert layout.response_ids.tolist() == [[7, 8, 2], [2, 0, 0], [4, 2, 0]]
    assert layout.num_tokens == 10 < build_layout(groups, "padded", 0).num_tokens == 15
    allowed = layout.attention[:, 0] == 0
    assert allowed[0].tolist() == torch.ones(5, 5, dtype=torch.bool).tril().tolist()
    assert allowed[1].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]
    ]  # fmt: skip


@settings(deadline=None)
@given(groups=groups_strategy)
def test_packing_never_takes_more_tokens_than_padding(groups):
    padded, packed = (build_layout(groups, kind, 0).num_tokens for kind in ("padded", "packed"))
    assert sum(len(g.prompt_ids) + len(r) for g in groups for r in g.responses) <= packed <= padded


def test_gradients_are_the_same_in_every_layout(stirred_network):
    groups = [Group((5, 9), ((7, 8, EOS), (4,))), Group((1, 2, 3), ((6, EOS),))]
    found = []
    for kind in ("padded", "shared", "packed"):
        layout = build_layout(groups, kind, 0)
        loss = (stirred_network.log_probs(layout) * torch.arange(1.0, 4.0)[:, None]).sum()
        found.append(torch.autograd.grad(loss, list(stirred_network.parameters().values()), allow_unused=True))
    for other in found[1:]:
        for one, gradient in zip(found[0], other, strict=True):
            assert (one is None) == (gradient is None)
            assert one is None or float((one - gradient).abs().max()) <= 1e-4


@settings(deadline=None)
@given(groups=groups_strategy, kind=KINDS)
def test_sizes_are_those_of_the_layout(groups, kind):
    for group, size in zip(groups, group_sizes(groups, kind), strict=True):
        assert build_layout([group], kind, 0).input_ids.shape == (size.rows, size.longest)


@settings(deadline=None)
@given(groups=groups_strategy, kind=KINDS, slack=st.integers(0, 60))
def test_a_microbatch_never_exceeds_the_budget(groups, kind, slack):
    sizes = group_sizes(groups, kind)
    budget = max(size.rows * size.longest for size in sizes) + slack
    batches = microbatches(sizes, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(groups)))
    assert all(build_layout([groups[i] for i in batch], kind, 0).num_tokens <= budget for batch in batches)


def test_microbatches_are_filled_before_another_is_begun():
    assert microbatches([(1, 4), (1, 10), (1, 4), (1, 4)], 12) == [[1], [0, 2, 3]]
    assert microbatches([], 10) == []
    assert microbatches([(1, 4), (1, 10), (1, 4), (1, 4)], 12, most=2) == [[1], [0, 2], [3]]


@settings(deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=12), data=st.data())
def test_microbatches_are_a_function_of_the_sizes(sizes, data):
    """Renaming rows changes nothing: the old-policy pass and the update must split alike."""
    names = data.draw(st.lists(st.text(max_size=3), min_size=len(sizes), max_size=len(sizes)))
    assert microbatches(sizes, 40, names) == microbatches(sizes, 40)


def test_a_row_that_alone_exceeds_the_budget_is_named():
    with pytest.raises(DataError, match=r"row-9: 2 x 30 tokens exceed the budget of 50") as error:
        microbatches([(1, 5), (2, 30)], 50, ["row-8", "row-9"])
    assert "raise the token budget or lower models.max_prompt_length" in str(error.value)
    with pytest.raises(DataError, match="item 0"):
        microbatches([(1, 51)], 50)


def test_auto_shares_where_it_saves():
    long_prompt = [Group((1,) * 20, ((2, 3), (4, 5)))]
    long_answers = [Group((1,), ((2,) * 20, (4,) * 20))]
    single = [Group((1,) * 20, ((2, 3),))]
    found = [resolve_layout("auto", groups) for groups in (long_prompt, long_answers, single)]
    assert found == ["shared", "padded", "padded"]
    assert resolve_layout("padded", long_prompt) == "padded"

"""Dropout: which ranks draw the same masks, what it leaves alone, and replay."""

import contextlib
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lib.layers.attention import attention_backend
from lib.layers.dropout import Dropout
from lib.parallel.groups import Group, ParallelGroups
from tests.distributed import run_on_ranks
from tests.layers.on_ranks import tensor_groups

ONES = torch.ones(500)


def masks_on_rank(sequence):
    groups = tensor_groups(sequence=sequence)
    hidden = Dropout.of_hidden(0.5, groups)
    heads = Dropout.of_heads(0.5, groups)
    drawn = [hidden(ONES), heads(ONES), hidden(ONES), heads(ONES)]
    q = torch.linspace(0, 1, 2 * 4 * 8).view(4, 2, 1, 8)
    for name in ("fused_softmax", "reference", "sdpa"):
        with heads.drawing() as probability:
            drawn.append(attention_backend(name)(q, q, q, probability))
    return drawn, torch.rand(8)


def all_equal(tensors):
    return all(torch.equal(first, second) for first, second in itertools.pairwise(tensors))


def all_different(tensors):
    pairs = itertools.combinations(tensors, 2)
    return not any(torch.equal(first, second) for first, second in pairs)


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_masks_are_alike_on_ranks_where_the_activation_is_whole(tensor, sequence):
    """Fault: one stream for shards, or other masks for what every rank holds."""
    ranks = run_on_ranks(tensor, masks_on_rank, sequence)
    for place in (0, 2):
        masks = [drawn[place] for drawn, _ in ranks]
        assert all_different(masks) if sequence else all_equal(masks)
    for place in (1, 3, 4, 5, 6):
        assert all_different([drawn[place] for drawn, _ in ranks])
    for drawn, _ in ranks:
        assert all_different(drawn[:4])
        for mask in drawn[:4]:
            assert set(mask.unique().tolist()) == {0.0, 2.0}
            assert 180 < mask.count_nonzero() < 320  # 250 by expectation, deviation 11
    # Whatever the ranks drew for themselves, their common stream stands at the same place.
    assert all_equal([after for _, after in ranks])


def untouched_on_rank(probability, training):
    groups = tensor_groups(sequence=True)
    layers = [Dropout.of_hidden(probability, groups), Dropout.of_heads(probability, groups)]
    default, own = torch.get_rng_state(), groups.shard_stream.state
    for layer in layers:
        layer.train(training)
        assert layer(ONES) is ONES
        with layer.drawing() as number:
            assert number == 0.0
            assert torch.equal(torch.get_rng_state(), default)
    return groups.shard_stream.state is own and torch.equal(torch.get_rng_state(), default)


@pytest.mark.parametrize(("probability", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_drawn_where_nothing_is_dropped(probability, training):
    assert run_on_ranks(2, untouched_on_rank, probability, training) == [True, True]


@pytest.mark.parametrize("make", [Dropout.of_hidden, Dropout.of_heads])
def test_one_rank_draws_from_the_default_stream(make):
    layer = make(0.25, ParallelGroups(sequence_parallel=True))
    torch.manual_seed(1)
    found = layer(ONES)
    torch.manual_seed(1)
    assert torch.equal(found, torch.nn.functional.dropout(ONES, 0.25))


def test_a_rank_of_several_needs_a_stream_of_its_own():
    layer = Dropout.of_heads(0.5, ParallelGroups(tp=Group(0, 2)))
    with pytest.raises(AssertionError):
        layer(ONES)
    layer.eval()
    assert layer(ONES) is ONES


def recomputed_on_rank(sequence):
    """Gradients of two dropouts, stored and computed again after more was drawn."""
    groups = tensor_groups(sequence=sequence)
    stream = groups.shard_stream
    layers = [Dropout.of_heads(0.5, groups), Dropout.of_hidden(0.5, groups)]
    start = torch.get_rng_state(), stream.state

    def both(x):
        return layers[1](layers[0](x * x) * x)

    def replaying():
        return contextlib.nullcontext(), stream.replayed(stream.state)

    results = []
    for again in (False, True):
        torch.set_rng_state(start[0])
        stream.state = start[1]
        x = torch.arange(500.0).requires_grad_()
        y = checkpoint(both, x, use_reentrant=False, context_fn=replaying) if again else both(x)
        layers[0](ONES)
        layers[1](ONES)
        (y * y).sum().backward()
        results.append((y.detach(), x.grad, stream.state, torch.get_rng_state()))
    return results


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputing_draws_the_same_masks(sequence):
    for stored, again in run_on_ranks(2, recomputed_on_rank, sequence):
        for first, second in zip(stored, again, strict=True):
            assert torch.equal(first, second)

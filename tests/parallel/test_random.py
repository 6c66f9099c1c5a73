"""Random streams depend on the seed and the names, and on nothing else."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.parallel.random import (
    derive_seed,
    named_generator,
    seed_default_stream,
    shard_stream,
)

CPU = torch.device("cpu")
names = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 9)), max_size=3)


@given(seed=st.integers(0, 2**63 - 1), parts=names)
def test_seeds_are_63_bits_and_repeatable(seed, parts):
    derived = derive_seed(seed, *parts)
    assert 0 <= derived < 2**63
    assert derived == derive_seed(seed, *parts)


def test_seeds_and_names_separate_streams():
    keys = [(seed, name, number) for seed in (1, 2) for name in "ab" for number in (0, 1, 11)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)


def test_known_value():
    """A change would change every model's initial weights."""
    assert derive_seed(1234, "init", "final_layernorm.weight") == 3986584939759515030


def test_generators_do_not_touch_the_default_one():
    state = torch.get_rng_state()
    first = torch.randn(4, generator=named_generator(1, "a"))
    assert torch.equal(first, torch.randn(4, generator=named_generator(1, "a")))
    assert not torch.equal(first, torch.randn(4, generator=named_generator(1, "b")))
    assert torch.equal(state, torch.get_rng_state())


def default_draw(seed, dp_rank, pp_rank):
    seed_default_stream(seed, dp_rank=dp_rank, pp_rank=pp_rank)
    return torch.rand(8)


def test_data_parallel_ranks_and_stages_draw_other_masks_and_the_same_again():
    places = [(7, dp_rank, pp_rank) for dp_rank in (0, 1, 2) for pp_rank in (0, 1)] + [(8, 0, 0)]
    draws = [default_draw(*place) for place in places]
    for first, second in itertools.combinations(draws, 2):
        assert not torch.equal(first, second)
    for place, drawn in zip(places, draws, strict=True):
        assert torch.equal(default_draw(*place), drawn)


def stream(seed=7, dp_rank=0, pp_rank=0, tp_rank=0):
    return shard_stream(seed, CPU, dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank)


def draw(stream, count=8):
    with stream.active():
        return torch.rand(count)


def test_every_rank_has_a_shard_stream_of_its_own():
    places = list(itertools.product((7, 8), (0, 1), (0, 1), (0, 1, 2, 3)))
    draws = [draw(stream(*place)) for place in places]
    draws += [default_draw(7, 0, 0), default_draw(8, 0, 0)]
    for first, second in itertools.combinations(draws, 2):
        assert not torch.equal(first, second)
    for place, drawn in zip(places, draws, strict=False):
        assert torch.equal(draw(stream(*place)), drawn)


def test_the_two_streams_do_not_move_each_other():
    """Drawn in turns, each gives what it gives alone."""
    alone = draw(stream(), 12)
    torch.manual_seed(3)
    default_alone = torch.rand(12)
    torch.manual_seed(3)
    own, mine, default = stream(), [], []
    for _ in range(3):
        mine.append(draw(own, 4))
        default.append(torch.rand(4))
    assert torch.equal(torch.cat(mine), alone)
    assert torch.equal(torch.cat(default), default_alone)


def test_an_error_inside_puts_the_default_stream_back():
    own, before = stream(), torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), own.active():
        raise ValueError(f"inside: {torch.rand(4)}")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draw(own), draw(stream(), 12)[4:])


def test_a_saved_state_goes_on_where_it_was():
    own = stream()
    draw(own, 5)
    saved = own.state.clone()
    expected = draw(own)
    restored = stream(tp_rank=1)
    restored.state = saved
    assert torch.equal(draw(restored), expected)
    assert torch.equal(own.state, restored.state)


def test_a_replayed_stream_goes_on_where_it_was():
    own = stream()
    start = own.state
    first = draw(own)
    second = draw(own)
    with own.replayed(start):
        assert torch.equal(draw(own), first)
        assert torch.equal(draw(own), second)
    with pytest.raises(ValueError, match="inside"), own.replayed(start):
        raise ValueError("inside")
    assert torch.equal(draw(own), draw(stream(), 24)[16:])

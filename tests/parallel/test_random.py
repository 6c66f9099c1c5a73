"""Random streams depend on the seed and the names, and on nothing else."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.parallel.random import derive_seed, named_generator, seed_streams

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


def test_data_parallel_ranks_draw_other_masks_and_the_same_again():
    draws = {}
    for rank in (0, 1, 2, 0):
        seed_streams(7, rank)
        drawn = torch.rand(8)
        if rank in draws:
            assert torch.equal(drawn, draws[rank])
        draws[rank] = drawn
    for first, second in itertools.combinations(draws.values(), 2):
        assert not torch.equal(first, second)
    seed_streams(8, 0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.rand(8), draws[0])

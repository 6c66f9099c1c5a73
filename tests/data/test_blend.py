"""Blending: the counts of every corpus are exact, and their draws are numbered in order."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.blend import Blend

SMALLEST = Fraction(1, 2**20)
ANY_WEIGHT = st.one_of(
    st.sampled_from([0.0, 0.1, 0.2, 0.7, 1.0, 5.0, 1e-9, 5e-324, 1e308]),
    st.integers(0, 10**18),
    st.floats(0, 1),
    st.floats(0, allow_infinity=False),
)
# Shares of a hundredth at least, so that a block is 1024 samples.
LIKE_WEIGHTS = st.lists(
    st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.7, 1.0, 2, 3, 8]), min_size=1, max_size=6
).filter(any)


def shares_of(weights):
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


@settings(max_examples=150)
@given(
    weights=st.lists(ANY_WEIGHT, min_size=1, max_size=12).filter(any),
    blocks=st.one_of(st.integers(0, 50), st.integers(0, 2**42 - 1)),
)
def test_counts_after_any_block_are_exact(weights, blocks):
    blend = Blend(weights, "key")
    shares = shares_of(weights)
    counts = blend.counts(blocks * blend.block)
    assert sum(counts) == blocks * blend.block
    for share, count in zip(shares, counts, strict=True):
        exact = share * blocks * blend.block
        if share == 0:
            assert count == 0
        elif share >= SMALLEST:
            assert math.floor(exact) <= count <= math.ceil(exact)
        else:
            assert abs(count - exact) < 2
    later = blend.counts((blocks + 1) * blend.block)
    assert all(after >= before for before, after in zip(counts, later, strict=True))


@settings(max_examples=100)
@given(
    st.lists(
        st.floats(1e-9, 5e-7) | st.integers(1, 60).map(lambda n: 2.0 ** -(23 + n)),
        min_size=2,
        max_size=40,
    ),
    st.integers(0, 2**40),
)
def test_tiny_shares_together_are_exact_and_each_less_than_two_off(tiny, blocks):
    blend = Blend([1.0, *tiny, 2.0], "key")
    assert blend.block == 1024
    samples = blocks * blend.block
    counts = blend.counts(samples)
    shares = shares_of([1.0, *tiny, 2.0])
    together = sum(shares[1:-1]) * samples
    assert sum(counts[1:-1]) == math.floor(together)
    for share, count in zip(shares[1:-1], counts[1:-1], strict=True):
        assert abs(count - share * samples) < 2
    later = blend.counts(samples + blend.block)
    assert all(after >= before for before, after in zip(counts, later, strict=True))


def test_no_tiny_share_is_starved():
    weights = [1.0, 1e-7, 2e-8, 3e-9]
    blend = Blend(weights, "key")
    samples = 10**9 // blend.block * blend.block
    assert blend.counts(samples)[1:] == pytest.approx([100, 20, 3], abs=2)


@settings(max_examples=150)
@given(st.lists(ANY_WEIGHT, min_size=2, max_size=8).filter(any))
def test_a_block_holds_a_sample_of_every_corpus_that_is_not_tiny(weights):
    """This is what keeps the counts from falling."""
    large = [share for share in shares_of(weights) if share >= SMALLEST]
    block = Blend(weights, "key").block
    assert 1024 <= block <= 2**20
    assert block.bit_count() == 1
    if len(large) > 1:
        assert min(large) * block >= 1
        assert block == 1024 or min(large) * block < 2


def test_a_weight_is_the_decimal_number_it_is_written_as():
    """0.1 + 0.2 is not 0.3 in binary, and ten blocks of 0.1 would come out one short."""
    blend = Blend([0.1, 0.2, 0.7], "key")
    assert blend.counts(10 * blend.block) == (1024, 2048, 7168)
    assert blend.counts(10**6 * blend.block) == (102_400_000, 204_800_000, 716_800_000)


@pytest.mark.parametrize("factor", [3, 1000, 0.5])
def test_weights_need_no_sum(factor):
    weights = [1, 2, 5]
    first = Blend(weights, "key").draws(0, 3000)
    second = Blend([factor * weight for weight in weights], "key").draws(0, 3000)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([], "at least one must be positive"),
        ([0.0, 0], "at least one must be positive"),
        ([1.0, -0.5], "each must be finite and not negative"),
        ([1.0, math.nan], "each must be finite and not negative"),
        ([1.0, math.inf], "each must be finite and not negative"),
    ],
)
def test_weights_that_are_none_are_refused(weights, says):
    with pytest.raises(ValueError, match=says):
        Blend(weights, "key")


@settings(max_examples=60)
@given(
    weights=LIKE_WEIGHTS,
    first=st.integers(0, 5000),
    length=st.integers(0, 3000),
    key=st.text(max_size=3),
)
def test_draws_are_numbered_by_position_and_agree_with_the_counts(weights, first, length, key):
    blend = Blend(weights, key)
    corpora, draws = blend.draws(0, first + length)
    assert corpora.dtype == draws.dtype == np.int64
    drawn = [0] * len(weights)
    for place, (corpus, draw) in enumerate(zip(corpora.tolist(), draws.tolist(), strict=True)):
        if place in (first, first // 2):
            assert blend.counts(place) == tuple(drawn)
        assert draw == drawn[corpus]
        drawn[corpus] += 1
    assert blend.counts(first + length) == tuple(drawn)
    # Any range is that part of the whole, by another instance too.
    for other in (blend, Blend(weights, key)):
        part = other.draws(first, first + length)
        np.testing.assert_array_equal(part[0], corpora[first:])
        np.testing.assert_array_equal(part[1], draws[first:])


@settings(max_examples=20)
@given(start=st.integers(2**40, 2**61), rare=st.sampled_from([0.3, 1e-3, 2.5e-4]))
def test_far_positions_stay_exact(start, rare):
    """B10: no 32 bits and no floating point anywhere."""
    blend = Blend([1.0, rare, 1.0], "key")
    start -= start % blend.block
    corpora, draws = blend.draws(start, start + blend.block)
    before, after = blend.counts(start), blend.counts(start + blend.block)
    for corpus, share in enumerate(shares_of([1.0, rare, 1.0])):
        assert abs(before[corpus] - share * start) < 1
        mine = draws[corpora == corpus].tolist()
        assert mine == list(range(before[corpus], after[corpus]))


def test_the_longest_block():
    blend = Blend([1e-6, 1.0], "key")
    assert blend.block == 2**20
    corpora, draws = blend.draws(0, 2**20)
    assert draws[corpora == 0].tolist() == [0]
    np.testing.assert_array_equal(draws[corpora == 1], np.arange(2**20 - 1))


def test_places_are_random_and_differ_from_block_to_block():
    blend = Blend([1, 3], "key")
    blocks = np.stack([blend.draws(1024 * b, 1024 * (b + 1))[0] for b in range(400)])
    assert (blocks == 0).sum(axis=1).tolist() == [256] * 400
    # In each place 100 blocks of 400 have corpus 0: the deviation is sqrt(400/16*3) = 8.7.
    counts = (blocks == 0).sum(axis=0)
    assert abs(counts - 100).max() < 6 * 8.7
    assert 7 < counts.std() < 10.5
    # Two blocks agree in 5/8 of 1024 places, give or take 15.
    for other in (blocks[1], blocks[2], Blend([1, 3], "other").draws(0, 1024)[0]):
        assert abs((blocks[0] == other).sum() - 640) < 6 * 15


def test_one_corpus_needs_no_block():
    blend = Blend([0, 2.5, 0], "key")
    corpora, draws = blend.draws(2**61, 2**61 + 5)
    assert corpora.tolist() == [1] * 5
    assert draws.tolist() == list(range(2**61, 2**61 + 5))
    assert blend.counts(2**62) == (0, 2**62, 0)


@pytest.mark.parametrize(
    "weights", [(0.999, 0.001), (0.001, 0.999), (1, 1), (1,), (5, 1, 1, 1, 1, 1), (1, 1e-9)]
)
@pytest.mark.parametrize("samples", [1, 2, 7, 1000, 10 * 1024])
def test_awkward_weights_and_lengths(weights, samples):
    """B17."""
    blend = Blend(weights, "key")
    counts = blend.counts(samples)
    assert sum(counts) == samples
    corpora, _ = blend.draws(0, samples)
    assert tuple(np.bincount(corpora, minlength=len(weights))) == counts
    if samples % blend.block == 0:
        for share, count in zip(shares_of(weights), counts, strict=True):
            assert abs(count - share * samples) < 1


def test_known_values():
    """A change of the blend changes every run in progress: it must not happen unnoticed."""
    corpora, draws = Blend([0.5, 0.3, 0.2], "blend/train/1234/0").draws(1020, 1036)
    assert corpora.tolist() == [0, 2, 0, 1, 2, 2, 1, 2, 1, 0, 1, 0, 1, 1, 0, 1]
    assert draws[corpora == 0].tolist() == [510, 511, 512, 513, 514]
    assert draws[0:4].tolist() == [510, 204, 511, 306]

"""Permutations: each a bijection, and as random as can be told."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.data.permutation import permute, round_keys, shuffle

# A chi-square value above this has a chance of about 1e-6 (Wilson and Hilferty's approximation).
_NORMAL_QUANTILE = 4.75


def chi_square_limit(degrees):
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + _NORMAL_QUANTILE * spread**0.5) ** 3


def chi_square(counts):
    expected = counts.sum() / counts.size
    return ((counts - expected) ** 2 / expected).sum()


def keys_of(name):
    return round_keys(str(name))[:, None]


def whole(size, name="a"):
    return permute(np.arange(size), size, keys_of(name))


def assert_permutation(images):
    assert images.dtype == np.int64
    np.testing.assert_array_equal(np.sort(images), np.arange(len(images)))


def test_every_size_up_to_300_is_a_permutation():
    for size in range(1, 301):
        assert_permutation(whole(size, size))
        assert_permutation(shuffle(size, round_keys(str(size))))


@pytest.mark.parametrize("power", [4, 6, 8, 10, 12])
def test_sizes_around_the_networks_domains_are_permutations(power):
    for size in (2**power - 1, 2**power, 2**power + 1):
        assert_permutation(whole(size))


@given(
    sizes=st.lists(st.integers(1, 2**62), min_size=1, max_size=20),
    seed=st.integers(0, 2**63 - 1),
)
def test_numbers_of_many_permutations_at_once_are_those_of_each_alone(sizes, seed):
    keys = [keys_of((seed, place % 3)) for place in range(len(sizes))]
    numbers = np.array([(seed + place) % size for place, size in enumerate(sizes)])
    together = permute(numbers, np.array(sizes), np.concatenate(keys, axis=1))
    for place, size in enumerate(sizes):
        alone = permute(numbers[place : place + 1], size, keys[place])
        assert together[place] == alone[0]
        assert 0 <= alone[0] < size


@pytest.mark.parametrize("size", [10**12, 2**40, 2**40 + 1, 2**62 - 57, 2**62])
def test_huge_sizes_stay_in_range_without_collisions(size):
    numbers = np.concatenate([np.arange(50_000), size - 1 - np.arange(50_000)])
    images = permute(numbers, size, keys_of("a"))
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(images)
    # A thousand bins of equal width are filled alike.
    counts = np.bincount(images // -(-size // 1000), minlength=1000)
    assert chi_square(counts) < chi_square_limit(999)


def test_other_keys_give_unrelated_permutations():
    images = [np.arange(1000), *(whole(1000, name) for name in ("a", "b", "a1", "1a"))]
    images += [shuffle(1000, round_keys(name)) for name in ("a", "b", "a1")]
    for first, second in itertools.combinations(images, 2):
        # Two random permutations agree in one place on average (Poisson): P(> 12) is 1e-10.
        assert (first == second).sum() <= 12


@pytest.mark.parametrize("size", [3, 5, 7, 16, 100, 1000])
def test_over_many_keys_every_image_is_equally_often_first(size):
    trials = max(2000, 5 * size)
    keys = np.stack([round_keys(str(trial)) for trial in range(trials)], axis=1)
    first = permute(np.zeros(trials, dtype=np.int64), size, keys)
    assert chi_square(np.bincount(first, minlength=size)) < chi_square_limit(size - 1)


@pytest.mark.parametrize("size", [5, 7, 12])
def test_over_many_keys_every_pair_is_equally_often_first(size):
    trials = 4000
    keys = np.stack([round_keys(str(trial)) for trial in range(trials)], axis=1)
    first, second = (permute(np.full(trials, place), size, keys) for place in (0, 1))
    counts = np.bincount(first * size + second, minlength=size**2)
    off_diagonal = ~np.eye(size, dtype=bool).reshape(-1)
    assert counts[~off_diagonal].sum() == 0
    assert chi_square(counts[off_diagonal]) < chi_square_limit(size * (size - 1) - 1)


@pytest.mark.parametrize("size", [1000, 4096, 10_007, 65_537])
@pytest.mark.parametrize("permutation", [whole, lambda size: shuffle(size, round_keys("a"))])
def test_no_fixed_stride_between_neighbours(size, permutation):
    images = permutation(size)
    for lag in (1, 2, 8, 64):
        strides = (images[lag:] - images[:-lag]) % size
        # Strides of a random permutation are uniform over 1..W-1.
        _, counts = np.unique(strides, return_counts=True)
        assert counts.max() <= 12
        assert chi_square(np.bincount(strides * 100 // size, minlength=100)) < chi_square_limit(99)


@pytest.mark.parametrize("permutation", [whole, lambda size: shuffle(size, round_keys("a"))])
def test_neighbours_are_not_correlated(permutation):
    images = permutation(50_000).astype(float)
    for lag in (1, 2, 3, 17, 256):
        # The correlation of independent values is about 1 / sqrt(n) = 0.0045.
        assert abs(np.corrcoef(images[lag:], images[:-lag])[0, 1]) < 5 / 50_000**0.5

"""The order of samples: a keyed permutation an epoch, the same in every layout."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.order import SampleOrder, step_positions

# A chi-square value above this has a chance of about 1e-6 (Wilson and Hilferty's approximation).
_NORMAL_QUANTILE = 4.75


def chi_square_limit(degrees):
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + _NORMAL_QUANTILE * spread**0.5) ** 3


def chi_square(counts):
    expected = counts.sum() / counts.size
    return ((counts - expected) ** 2 / expected).sum()


def epoch_of(num_samples, *, seed=1234, epoch=0, purpose="train"):
    start = epoch * num_samples
    positions = np.arange(start, start + num_samples)
    return SampleOrder(num_samples, seed, purpose).samples_at(positions)


def assert_permutation(samples):
    assert samples.dtype == np.int64
    np.testing.assert_array_equal(np.sort(samples), np.arange(len(samples)))


def test_every_size_up_to_300_is_a_permutation_in_every_epoch():
    for num_samples in range(1, 301):
        for epoch in (0, 1, 7):
            assert_permutation(epoch_of(num_samples, epoch=epoch))


@pytest.mark.parametrize("power", [4, 6, 8, 10, 12])
def test_sizes_around_the_networks_domains_are_permutations(power):
    for num_samples in (2**power - 1, 2**power, 2**power + 1):
        assert_permutation(epoch_of(num_samples))


@given(
    num_samples=st.integers(1, 10_000),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10**6),
    purpose=st.sampled_from(["train", "valid"]),
)
def test_any_epoch_is_a_permutation(num_samples, seed, epoch, purpose):
    assert_permutation(epoch_of(num_samples, seed=seed, epoch=epoch, purpose=purpose))


@pytest.mark.parametrize("num_samples", [10**12, 2**40, 2**40 + 1, 2**62 - 57])
def test_huge_corpora_stay_in_range_without_collisions(num_samples):
    order = SampleOrder(num_samples, 1)
    positions = np.concatenate([np.arange(100_000), num_samples - 1 - np.arange(100_000)])
    samples = order.samples_at(positions)
    assert samples.min() >= 0
    assert samples.max() < num_samples
    assert len(np.unique(samples)) == len(samples)
    # A thousand bins of equal width are filled alike.
    bins = samples // -(-num_samples // 1000)
    counts = np.bincount(bins, minlength=1000)
    assert chi_square(counts) < chi_square_limit(999)


def test_epochs_seeds_and_purposes_have_unrelated_orders():
    base = epoch_of(1000)
    others = [
        epoch_of(1000, epoch=1),
        epoch_of(1000, epoch=2),
        epoch_of(1000, seed=1235),
        epoch_of(1000, purpose="valid"),
        np.arange(1000),
    ]
    for first, second in itertools.combinations([base, *others], 2):
        # Two random permutations agree in one place on average (Poisson): P(> 12) is 1e-10.
        assert (first == second).sum() <= 12


@settings(max_examples=40)
@given(num_samples=st.integers(1, 500), shorter=st.integers(0, 300), more=st.integers(0, 300))
def test_a_longer_run_keeps_the_order_of_what_was_read(num_samples, shorter, more):
    order = SampleOrder(num_samples, 5)
    long = order.samples_at(np.arange(shorter + more))
    np.testing.assert_array_equal(long[:shorter], order.samples_at(np.arange(shorter)))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_a_sample_depends_on_its_position_alone(positions):
    order = SampleOrder(777, 5)
    whole = order.samples_at(np.arange(5001))
    np.testing.assert_array_equal(order.samples_at(np.array(positions)), whole[positions])
    column = np.array(positions).reshape(-1, 1)
    np.testing.assert_array_equal(order.samples_at(column), whole[column])


def test_no_positions_give_no_samples():
    assert SampleOrder(10, 1).samples_at(np.zeros((0, 3), dtype=np.int64)).shape == (0, 3)


def test_known_values():
    """A change of the order changes every run in progress: it must not happen unnoticed."""
    assert epoch_of(10).tolist() == [2, 8, 7, 1, 6, 9, 3, 0, 5, 4]
    assert epoch_of(10, epoch=1).tolist() == [5, 4, 3, 9, 6, 0, 1, 2, 8, 7]
    big = SampleOrder(10**12, 42, "valid").samples_at(np.arange(3))
    assert big.tolist() == [739304953231, 594107532572, 181637406685]


@pytest.mark.parametrize("num_samples", [3, 5, 7, 16, 100, 1000])
def test_over_many_seeds_every_sample_is_equally_often_first(num_samples):
    trials = max(2000, 5 * num_samples)
    first = [SampleOrder(num_samples, seed).samples_at(np.array([0]))[0] for seed in range(trials)]
    counts = np.bincount(first, minlength=num_samples)
    assert chi_square(counts) < chi_square_limit(num_samples - 1)


@pytest.mark.parametrize("num_samples", [5, 7, 12])
def test_over_many_seeds_every_pair_is_equally_often_first(num_samples):
    pairs = np.array([epoch_of(num_samples, seed=seed)[:2] for seed in range(4000)])
    counts = np.bincount(pairs[:, 0] * num_samples + pairs[:, 1], minlength=num_samples**2)
    off_diagonal = ~np.eye(num_samples, dtype=bool).reshape(-1)
    assert counts[~off_diagonal].sum() == 0
    assert chi_square(counts[off_diagonal]) < chi_square_limit(num_samples * (num_samples - 1) - 1)


@pytest.mark.parametrize("num_samples", [1000, 4096, 10_007, 65_537])
@pytest.mark.parametrize("lag", [1, 2, 8, 64])
def test_no_fixed_stride_between_neighbours(num_samples, lag):
    samples = epoch_of(num_samples)
    strides = (samples[lag:] - samples[:-lag]) % num_samples
    # Strides of a random permutation are uniform over 1..W-1.
    _, counts = np.unique(strides, return_counts=True)
    assert counts.max() <= 12
    bins = np.bincount(strides * 100 // num_samples, minlength=100)
    assert chi_square(bins) < chi_square_limit(99)


def test_neighbours_are_not_correlated():
    samples = epoch_of(50_000).astype(float)
    for lag in (1, 2, 3, 17, 256):
        # The correlation of independent values is about 1 / sqrt(n) = 0.0045.
        assert abs(np.corrcoef(samples[lag:], samples[:-lag])[0, 1]) < 5 / 50_000**0.5


@given(
    consumed=st.integers(0, 10**6),
    micro_batches=st.integers(1, 5),
    micro_batch_size=st.integers(1, 4),
    dp_size=st.integers(1, 5),
)
def test_ranks_together_read_the_next_consecutive_positions(
    consumed, micro_batches, micro_batch_size, dp_size
):
    shares = [
        step_positions(
            consumed,
            micro_batches=micro_batches,
            micro_batch_size=micro_batch_size,
            dp_rank=rank,
            dp_size=dp_size,
        )
        for rank in range(dp_size)
    ]
    assert all(share.shape == (micro_batches, micro_batch_size) for share in shares)
    together = np.concatenate(shares, axis=None)
    batch = micro_batches * micro_batch_size * dp_size
    np.testing.assert_array_equal(np.sort(together), np.arange(consumed, consumed + batch))
    # Micro batch m of all ranks is consecutive too, rank after rank.
    for number in range(micro_batches):
        row = np.concatenate([share[number] for share in shares])
        start = consumed + number * micro_batch_size * dp_size
        np.testing.assert_array_equal(row, np.arange(start, start + len(row)))


def samples_of_steps(*, dp_size, micro_batch_size, global_batch_size, steps, num_samples):
    micro_batches = global_batch_size // (dp_size * micro_batch_size)
    order = SampleOrder(num_samples, 99)
    return [
        sorted(
            np.concatenate(
                [
                    order.samples_at(
                        step_positions(
                            step * global_batch_size,
                            micro_batches=micro_batches,
                            micro_batch_size=micro_batch_size,
                            dp_rank=rank,
                            dp_size=dp_size,
                        )
                    )
                    for rank in range(dp_size)
                ],
                axis=None,
            ).tolist()
        )
        for step in range(steps)
    ]


def test_the_samples_of_a_step_do_not_depend_on_the_layout():
    """B19: union over ranks of every step, at data-parallel size 1, 2, 3 and 6."""
    layouts = [(1, 6), (1, 3), (1, 1), (2, 3), (2, 1), (3, 2), (3, 1), (6, 1)]
    steps = [
        samples_of_steps(
            dp_size=dp_size,
            micro_batch_size=micro_batch_size,
            global_batch_size=6,
            steps=4,
            num_samples=12,
        )
        for dp_size, micro_batch_size in layouts
    ]
    assert all(other == steps[0] for other in steps)
    # Two epochs of two steps: every sample once an epoch.
    assert sorted(steps[0][0] + steps[0][1]) == list(range(12))
    assert sorted(steps[0][2] + steps[0][3]) == list(range(12))
    assert steps[0][:2] != steps[0][2:]


def test_no_duplicates_inside_a_step_of_one_epoch():
    """B19: ten samples, micro batch 2 on 3 ranks; steps inside the epoch hold no sample twice."""
    steps = samples_of_steps(
        dp_size=3, micro_batch_size=2, global_batch_size=6, steps=5, num_samples=10
    )
    assert len(set(steps[0])) == 6
    # 30 positions are 3 epochs exactly: every sample three times.
    assert sorted(itertools.chain(*steps)) == sorted(list(range(10)) * 3)

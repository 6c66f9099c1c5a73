"""What ranks read of the order: together the same samples in any layout, threads or not."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.data.order import Drawn, SampleOrder, Segment, step_positions


def pairs_of(drawn):
    return list(zip(drawn.corpus.tolist(), drawn.sample.tolist(), strict=True))


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


def blended():
    segments = [
        Segment(0, (1, 2, 0), (10, 7, 5), 8),
        Segment(12, (1, 1, 1), (10, 7, 5), 8),
        Segment(30, (3, 0, 1), (5, 3, 2), 16),
    ]
    return SampleOrder(segments, 99, ("web", "code", "books"))


def steps_of(order, *, dp_size, micro_batch_size, global_batch_size, steps):
    """What each rank reads in each step."""
    micro_batches = global_batch_size // (dp_size * micro_batch_size)
    return [
        [
            pairs_of(
                order.samples_at(
                    step_positions(
                        step * global_batch_size,
                        micro_batches=micro_batches,
                        micro_batch_size=micro_batch_size,
                        dp_rank=rank,
                        dp_size=dp_size,
                    ).reshape(-1)
                )
            )
            for rank in range(dp_size)
        ]
        for step in range(steps)
    ]


@pytest.mark.parametrize("make", [lambda: SampleOrder.of_one(12, 99, "web"), blended])
def test_the_samples_of_a_step_do_not_depend_on_the_layout(make):
    """B19: union over ranks of every step, each rank with an order of its own."""
    layouts = [(1, 6), (1, 3), (1, 1), (2, 3), (2, 1), (3, 2), (3, 1), (6, 1)]
    found = []
    for dp_size, micro_batch_size in layouts:
        steps = steps_of(
            make(),
            dp_size=dp_size,
            micro_batch_size=micro_batch_size,
            global_batch_size=6,
            steps=8,
        )
        assert all(len({len(share) for share in step}) == 1 for step in steps)
        found.append([sorted(itertools.chain(*step)) for step in steps])
    assert all(other == found[0] for other in found)
    whole = pairs_of(make().samples_at(np.arange(48)))
    assert found[0] == [sorted(whole[6 * step : 6 * step + 6]) for step in range(8)]


def test_ranks_change_epoch_together_and_no_step_has_a_sample_twice():
    """B15, B19: ten samples, micro batch 2 on 3 ranks."""
    order = SampleOrder.of_one(10, 99, "web")
    steps = steps_of(order, dp_size=3, micro_batch_size=2, global_batch_size=6, steps=5)
    read = [[sample for share in step for _, sample in share] for step in steps]
    # Steps 0 and 4 and parts of the others are inside an epoch. Thirty positions are 3 epochs.
    positions = list(itertools.chain(*read))
    assert all(sorted(positions[e : e + 10]) == list(range(10)) for e in (0, 10, 20))
    assert positions[:10] != positions[10:20] != positions[20:]


def test_threads_that_read_at_once_read_the_same():
    """Any number of workers: the order keeps no state but what it has worked out already."""
    wanted = blended().samples_at(np.arange(20_000))
    for workers in (1, 2, 5):
        order = blended()
        with ThreadPoolExecutor(workers) as pool:
            steps = [np.arange(start, start + 500) for start in range(0, 20_000, 500)]
            found = list(pool.map(order.samples_at, steps))
        together = Drawn(*map(np.concatenate, zip(*found, strict=True)))
        np.testing.assert_array_equal(together.corpus, wanted.corpus)
        np.testing.assert_array_equal(together.sample, wanted.sample)

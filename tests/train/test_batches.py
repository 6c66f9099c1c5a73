"""Micro batches of a step: the same samples in every layout, whatever is read ahead."""

import numpy as np
import pytest
import torch

from lib.config.batch_schedule import BatchSchedule
from lib.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from lib.data.order import SampleOrder
from lib.data.samples import SampleWindows
from lib.data.splits import describe_splits
from lib.parallel.groups import Group
from lib.train.batches import BatchShape, TrainingBatches, validation_batches

SEQ = 5
CPU = torch.device("cpu")
TWELVE = BatchSchedule.constant(12)
RAMPUP = BatchSchedule(8, start=2, increment=2, samples=24)
RAMPUP_BEGINNINGS = [0, 2, 4, 6, 8, 12, 16, 22, 28, 36, 44]
LAYOUTS = [(1, 12), (1, 4), (1, 1), (2, 3), (2, 1), (3, 2), (4, 3)]


@pytest.fixture
def windows(tmp_path):
    """38 samples; token i of the stream is i, so a sample's first token tells which it is."""
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for first in range(0, 192, 16):
            writer.add_document(np.arange(first, first + 16))
    dataset = IndexedDataset(tmp_path / "corpus")
    return SampleWindows(dataset, describe_splits(dataset, "1,0,0", SEQ)["train"], SEQ)


def shape_of(dp_size, rank, micro_batch_size, schedule=TWELVE):
    return BatchShape(micro_batch_size, schedule, Group(rank, dp_size))


def samples_in(batches):
    """Sample numbers of micro batches, after checking their tokens and labels."""
    numbers = []
    for batch in batches:
        for tokens, labels in zip(batch.tokens_SB.T, batch.labels_SB.T, strict=True):
            assert torch.equal(labels, tokens + 1)
            assert torch.equal(tokens, tokens[0] + torch.arange(SEQ))
            assert tokens[0] % SEQ == 0
            numbers.append(int(tokens[0]) // SEQ)
        assert batch.weights_SB.eq(1).all()
        assert batch.num_tokens == batch.tokens_SB.numel()
    return numbers


def run(windows, shape, *, prefetch=2, steps=7, start=0):
    order = SampleOrder(windows.num_samples, 7)
    batches = TrainingBatches(windows, order, shape, CPU, prefetch)
    try:
        return [samples_in(batches.take(start + 12 * step)) for step in range(steps)]
    finally:
        batches.close()


def test_a_step_reads_the_same_samples_in_every_layout(windows):
    """B19; the steps run over two borders between epochs of 38 samples."""
    assert windows.num_samples == 38
    order = SampleOrder(38, 7)
    for dp_size, micro_batch_size in LAYOUTS:
        ranks = [run(windows, shape_of(dp_size, rank, micro_batch_size)) for rank in range(dp_size)]
        for step in range(7):
            together = sorted(number for rank in ranks for number in rank[step])
            expected = order.samples_at(np.arange(12 * step, 12 * step + 12))
            assert together == sorted(expected.tolist())
            assert len({len(rank[step]) for rank in ranks}) == 1
    flat = [number for step in run(windows, shape_of(1, 0, 4)) for number in step]
    assert sorted(flat[:38]) == sorted(flat[38:76]) == list(range(38))


def test_shapes(windows):
    shape = shape_of(2, 1, 3)
    assert shape.micro_batches(0) == shape.micro_batches(120) == 2
    batches = TrainingBatches(windows, SampleOrder(38, 7), shape, CPU, 0)
    taken = batches.take(0)
    batches.close()
    assert [tuple(batch.tokens_SB.shape) for batch in taken] == [(SEQ, 3), (SEQ, 3)]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_reading_ahead_changes_nothing(windows, prefetch):
    shape = shape_of(2, 1, 2)
    assert run(windows, shape, prefetch=prefetch) == run(windows, shape, prefetch=2)


def test_a_resumed_run_reads_what_it_would_have_read(windows):
    shape = shape_of(1, 0, 4)
    whole = run(windows, shape)
    for step in (1, 3, 6):
        assert run(windows, shape, start=12 * step, steps=7 - step) == whole[step:]


def test_jumps_are_followed(windows):
    shape = shape_of(1, 0, 4)
    whole = run(windows, shape)
    batches = TrainingBatches(windows, SampleOrder(38, 7), shape, CPU, 3)
    for step in (4, 0, 1, 6, 6, 2):
        assert samples_in(batches.take(12 * step)) == whole[step]
    batches.close()


def take_rampup(windows, shape, prefetch, beginnings):
    batches = TrainingBatches(windows, SampleOrder(38, 7), shape, CPU, prefetch)
    taken = [batches.take(consumed) for consumed in beginnings]
    batches.close()
    assert [len(step) for step in taken] == [shape.micro_batches(n) for n in beginnings]
    return [samples_in(step) for step in taken]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_a_rampup_reads_the_same_order_in_steps_of_its_own_sizes(windows, prefetch):
    """B52: sizes 2, 2, 2, 2, 4, 4, 6, 6, 8, ... over one order of samples, in every layout."""
    order = SampleOrder(38, 7).samples_at(np.arange(52))
    ends = [*RAMPUP_BEGINNINGS[1:], 52]
    for dp_size, micro_batch_size in [(1, 1), (1, 2), (2, 1)]:
        shapes = [shape_of(dp_size, rank, micro_batch_size, RAMPUP) for rank in range(dp_size)]
        ranks = [take_rampup(windows, shape, prefetch, RAMPUP_BEGINNINGS) for shape in shapes]
        for step, (begin, end) in enumerate(zip(RAMPUP_BEGINNINGS, ends, strict=True)):
            together = sorted(number for rank in ranks for number in rank[step])
            assert together == sorted(order[begin:end].tolist())


def test_a_run_resumed_in_its_rampup_reads_what_it_would_have_read(windows):
    """B52"""
    shape = shape_of(2, 1, 1, RAMPUP)
    whole = take_rampup(windows, shape, 2, RAMPUP_BEGINNINGS)
    for step in range(len(whole)):
        assert take_rampup(windows, shape, 2, RAMPUP_BEGINNINGS[step:]) == whole[step:]


def test_reading_draws_no_random_numbers(windows):
    """B31, B70: neither training batches nor validation touch the default streams."""
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 - the stream that must be left alone
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run(windows, shape_of(1, 0, 4))
    validation_batches(windows, SampleOrder(38, 7, "valid"), shape_of(1, 0, 4), 20)
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


def test_a_reader_that_fails_says_so_in_the_loop(windows):
    order = SampleOrder(10**6, 7)  # more than there are
    batches = TrainingBatches(windows, order, shape_of(1, 0, 4), CPU, 2)
    with pytest.raises(IndexError, match="of 38"):
        batches.take(0)
    batches.close()


def counted_samples(batches):
    numbers = []
    for batch in batches:
        columns = zip(batch.tokens_SB.T, batch.labels_SB.T, batch.weights_SB.T, strict=True)
        for tokens, labels, weights in columns:
            assert weights.eq(weights[0]).all()
            if weights[0]:
                numbers.append(int(tokens[0]) // SEQ)
                assert torch.equal(labels, tokens + 1)
            else:
                assert tokens.eq(0).all()
                assert labels.eq(0).all()
    assert sum(batch.num_tokens for batch in batches) == len(numbers) * SEQ
    return numbers


@pytest.mark.parametrize("wanted", [1, 12, 13, 36, 38, 500])
def test_validation_counts_the_wanted_samples_once_in_every_layout(windows, wanted):
    """B69: as many as asked for (or as there are), the same ones, on equally many batches."""
    order = SampleOrder(38, 7, "valid")
    expected = sorted(order.samples_at(np.arange(min(wanted, 38))).tolist())
    for dp_size, micro_batch_size in LAYOUTS:
        ranks = [
            validation_batches(windows, order, shape_of(dp_size, r, micro_batch_size), wanted)
            for r in range(dp_size)
        ]
        assert sorted(n for rank in ranks for n in counted_samples(rank)) == expected
        assert len({len(rank) for rank in ranks}) == 1
        assert all(b.tokens_SB.shape == (SEQ, micro_batch_size) for rank in ranks for b in rank)


def test_validation_repeats_the_same_samples(windows):
    order = SampleOrder(38, 7, "valid")
    one, two = (validation_batches(windows, order, shape_of(1, 0, 5), 20) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first.tokens_SB, second.tokens_SB)


def test_nothing_to_validate_gives_no_batches(windows):
    order = SampleOrder(38, 7, "valid")
    assert validation_batches(windows, order, shape_of(1, 0, 4), 0) == []

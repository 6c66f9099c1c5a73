"""Micro batches of a step: the same samples in every layout, whatever is read ahead."""

import numpy as np
import pytest
import torch

from lib.config.batch_schedule import BatchSchedule
from lib.config.data_facts import Phase
from lib.data.blended_samples import BlendedSamples
from lib.data.order import SampleOrder
from lib.data.samples import SampleWindows
from lib.data.splits import whole_split
from lib.model.loss import SampleRules
from lib.parallel.groups import Group
from lib.train.batches import BatchShape, Reading, TrainingBatches, validation_set
from tests.data.tiny_corpus import open_corpus

SEQ = 5
CPU = torch.device("cpu")
PLAIN = SampleRules()
TWELVE = BatchSchedule.constant(12)
RAMPUP = BatchSchedule(8, start=2, increment=2, samples=24)
RAMPUP_BEGINNINGS = [0, 2, 4, 6, 8, 12, 16, 22, 28, 36, 44]
LAYOUTS = [(1, 12), (1, 4), (1, 1), (2, 3), (2, 1), (3, 2), (4, 3)]


@pytest.fixture
def corpus(tmp_path):
    """38 samples; token i of the stream is i, so a sample's first token tells which it is."""
    return open_corpus(tmp_path, [np.arange(first, first + 16) for first in range(0, 192, 16)])


@pytest.fixture
def windows(corpus):
    return SampleWindows(corpus, whole_split(corpus, SEQ), SEQ)


@pytest.fixture
def samples(windows):
    return BlendedSamples([[windows]], SampleOrder.of_one(38, 7, "tiny"))


def phase(micro_batch_size, from_samples=0, seq_length=SEQ):
    weights, samples = {"tiny": 38.0}, {"tiny": 191 // seq_length}
    return Phase(
        from_samples=from_samples,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        weights=weights,
        samples=samples,
    )


def shape_of(dp_size, rank, micro_batch_size, schedule=TWELVE, *later):
    return BatchShape((phase(micro_batch_size), *later), schedule, Group(rank, dp_size))


def reading(prefetch=2, num_workers=1, rules=PLAIN):
    return Reading(rules, CPU, num_workers=num_workers, prefetch=prefetch)


def samples_in(batches, seq_length=SEQ):
    """Sample numbers of micro batches, after checking their tokens and labels."""
    numbers = []
    for batch in batches:
        for tokens, labels in zip(batch.tokens_SB.T, batch.labels_SB.T, strict=True):
            assert torch.equal(labels, tokens + 1)
            assert torch.equal(tokens, tokens[0] + torch.arange(seq_length))
            assert tokens[0] % seq_length == 0
            numbers.append(int(tokens[0]) // seq_length)
        assert batch.weights_SB.eq(1).all()
        assert batch.num_tokens == batch.tokens_SB.numel()
    return numbers


def run(samples, shape, how=None, *, steps=7, start=0):
    batches = TrainingBatches(samples, shape, how or reading())
    try:
        return [samples_in(batches.take(start + 12 * step)) for step in range(steps)]
    finally:
        batches.close()


def test_a_step_reads_the_same_samples_in_every_layout(samples):
    """B19; the steps run over two borders between epochs of 38 samples."""
    for dp_size, micro_batch_size in LAYOUTS:
        ranks = [run(samples, shape_of(dp_size, rank, micro_batch_size)) for rank in range(dp_size)]
        for step in range(7):
            together = sorted(number for rank in ranks for number in rank[step])
            expected = samples.order.samples_at(np.arange(12 * step, 12 * step + 12)).sample
            assert together == sorted(expected.tolist())
            assert len({len(rank[step]) for rank in ranks}) == 1
    flat = [number for step in run(samples, shape_of(1, 0, 4)) for number in step]
    assert sorted(flat[:38]) == sorted(flat[38:76]) == list(range(38))


def test_shapes(samples):
    shape = shape_of(2, 1, 3)
    assert shape.micro_batches(0) == shape.micro_batches(120) == 2
    batches = TrainingBatches(samples, shape, reading(prefetch=0))
    taken = batches.take(0)
    batches.close()
    assert [tuple(batch.tokens_SB.shape) for batch in taken] == [(SEQ, 3), (SEQ, 3)]


@pytest.mark.parametrize(("prefetch", "num_workers"), [(0, 1), (1, 2), (5, 1), (5, 4), (0, 3)])
def test_neither_reading_ahead_nor_more_readers_change_anything(samples, prefetch, num_workers):
    shape = shape_of(2, 1, 2)
    expected = run(samples, shape)
    assert run(samples, shape, reading(prefetch, num_workers)) == expected


def test_a_resumed_run_reads_what_it_would_have_read(samples):
    shape = shape_of(1, 0, 4)
    whole = run(samples, shape)
    for step in (1, 3, 6):
        assert run(samples, shape, start=12 * step, steps=7 - step) == whole[step:]


def test_jumps_are_followed(samples):
    shape = shape_of(1, 0, 4)
    whole = run(samples, shape)
    batches = TrainingBatches(samples, shape, reading(prefetch=3))
    for step in (4, 0, 1, 6, 6, 2):
        assert samples_in(batches.take(12 * step)) == whole[step]
    batches.close()


def take_rampup(samples, shape, prefetch, beginnings):
    batches = TrainingBatches(samples, shape, reading(prefetch))
    taken = [batches.take(consumed) for consumed in beginnings]
    batches.close()
    assert [len(step) for step in taken] == [shape.micro_batches(n) for n in beginnings]
    return [samples_in(step) for step in taken]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_a_rampup_reads_the_same_order_in_steps_of_its_own_sizes(samples, prefetch):
    """B52: sizes 2, 2, 2, 2, 4, 4, 6, 6, 8, ... over one order of samples, in every layout."""
    order = samples.order.samples_at(np.arange(52)).sample
    ends = [*RAMPUP_BEGINNINGS[1:], 52]
    for dp_size, micro_batch_size in [(1, 1), (1, 2), (2, 1)]:
        shapes = [shape_of(dp_size, rank, micro_batch_size, RAMPUP) for rank in range(dp_size)]
        ranks = [take_rampup(samples, shape, prefetch, RAMPUP_BEGINNINGS) for shape in shapes]
        for step, (begin, end) in enumerate(zip(RAMPUP_BEGINNINGS, ends, strict=True)):
            together = sorted(number for rank in ranks for number in rank[step])
            assert together == sorted(order[begin:end].tolist())


def test_a_run_resumed_in_its_rampup_reads_what_it_would_have_read(samples):
    """B52"""
    shape = shape_of(2, 1, 1, RAMPUP)
    whole = take_rampup(samples, shape, 2, RAMPUP_BEGINNINGS)
    for step in range(len(whole)):
        assert take_rampup(samples, shape, 2, RAMPUP_BEGINNINGS[step:]) == whole[step:]


@pytest.mark.parametrize("prefetch", [0, 2, 5])
def test_a_later_phase_has_its_own_lengths(corpus, windows, prefetch):
    """From sample 36 on twice as long and one at a time, read ahead over the border or not."""
    longer = SampleWindows(corpus, whole_split(corpus, 2 * SEQ), 2 * SEQ)
    phases = (phase(4), phase(1, 36, 2 * SEQ))
    samples = BlendedSamples([[windows], [longer]], SampleOrder.of_phases(phases, 7))
    ranks = [
        TrainingBatches(samples, shape_of(2, rank, 3, TWELVE, phases[1]), reading(prefetch))
        for rank in range(2)
    ]
    for step, (length, count) in enumerate([(SEQ, 2)] * 3 + [(2 * SEQ, 6)] * 2):
        taken = [batches.take(12 * step) for batches in ranks]
        assert [len(batches) for batches in taken] == [count, count]
        found = sorted(number for batches in taken for number in samples_in(batches, length))
        expected = samples.order.samples_at(np.arange(12 * step, 12 * step + 12)).sample
        assert found == sorted(expected.tolist())
    for batches in ranks:
        batches.close()


class Counting(BlendedSamples):
    """Counts how often tokens and borders of documents are asked for."""

    windows_read = starts_read = 0

    def windows_at(self, positions):
        self.windows_read += 1
        return super().windows_at(positions)

    def starts_at(self, positions):
        self.starts_read += 1
        return super().starts_at(positions)


@pytest.mark.parametrize("reads_tokens", [True, False])
@pytest.mark.parametrize("rules", [PLAIN, SampleRules(within_documents=True)], ids=["plain", "doc"])
def test_a_stage_reads_what_it_needs_and_no_more(windows, reads_tokens, rules):
    """A stage between the ends reads no token; borders of documents are for those who ask."""
    samples = Counting([[windows]], SampleOrder.of_one(38, 7, "tiny"))
    how = Reading(rules, CPU, reads_tokens=reads_tokens, prefetch=0)
    batches = TrainingBatches(samples, shape_of(1, 0, 4), how)
    taken = batches.take(0)
    batches.close()
    assert samples.windows_read == (3 if reads_tokens else 0)
    assert samples.starts_read == (3 if rules.need_starts else 0)
    assert all(tuple(batch.tokens_SB.shape) == (SEQ, 4) for batch in taken)
    assert all((batch.layout is not None) == rules.need_starts for batch in taken)


def test_reading_draws_no_random_numbers(samples, windows):
    """B31, B70: neither training batches nor validation touch the default streams."""
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 - the stream that must be left alone
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run(samples, shape_of(1, 0, 4))
    validate(windows, shape_of(1, 0, 4), 20)
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


def test_a_reader_that_fails_says_so_in_the_loop(samples, monkeypatch):
    def fail(_positions):
        raise IndexError("sample 38 of 38")

    monkeypatch.setattr(samples, "windows_at", fail)
    batches = TrainingBatches(samples, shape_of(1, 0, 4), reading())
    with pytest.raises(IndexError, match="of 38"):
        batches.take(0)
    batches.close()


def validate(windows, shape, wanted):
    return validation_set("tiny", windows, 7, wanted, (shape, reading())).batches


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
    order = SampleOrder.of_one(38, 7, "tiny", "valid")
    expected = sorted(order.samples_at(np.arange(min(wanted, 38))).sample.tolist())
    for dp_size, micro_batch_size in LAYOUTS:
        ranks = [
            validate(windows, shape_of(dp_size, r, micro_batch_size), wanted)
            for r in range(dp_size)
        ]
        assert sorted(n for rank in ranks for n in counted_samples(rank)) == expected
        assert len({len(rank) for rank in ranks}) == 1
        assert all(b.tokens_SB.shape == (SEQ, micro_batch_size) for rank in ranks for b in rank)


def test_validation_repeats_the_same_samples(windows):
    one, two = (validate(windows, shape_of(1, 0, 5), 20) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first.tokens_SB, second.tokens_SB)

"""The order of samples: every one once an epoch, the same in every layout, whatever is blended."""

import itertools
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.order import SampleOrder, Segment

NAMES = ("web", "code", "books")
WEIGHT = st.sampled_from([0, 0.1, 0.3, 1, 2.5, 7])


def epoch_of(num_samples, *, seed=1234, epoch=0, purpose="train"):
    start = epoch * num_samples
    positions = np.arange(start, start + num_samples)
    return SampleOrder.of_one(num_samples, seed, "web", purpose).samples_at(positions).sample


@st.composite
def segments_of(draw, *, lengths=(8,), most=4):
    """Segments of up to three corpora; the sizes go with the sequence length."""
    corpora = draw(st.integers(1, 3))
    sizes = {length: draw(st.tuples(*[st.integers(1, 400)] * corpora)) for length in lengths}
    starts = draw(st.lists(st.integers(1, 3000), max_size=most - 1, unique=True).map(sorted))
    segments = []
    for start in [0, *starts]:
        weights = draw(st.tuples(*[WEIGHT] * corpora).filter(any))
        length = draw(st.sampled_from(lengths))
        segments.append(Segment(start, weights, sizes[length], length))
    return segments


def order_of(segments, seed=5):
    return SampleOrder(segments, seed, NAMES[: len(segments[0].weights)])


def assert_equal(first, second):
    np.testing.assert_array_equal(first.corpus, second.corpus)
    np.testing.assert_array_equal(first.sample, second.sample)


def pairs_of(drawn):
    return list(zip(drawn.corpus.tolist(), drawn.sample.tolist(), strict=True))


def assert_epochs(samples, size):
    """Each run of ``size`` samples holds every number once; the last may be cut short."""
    for start in range(0, len(samples), size):
        epoch = samples[start : start + size]
        assert len(set(epoch)) == len(epoch)
        assert all(0 <= sample < size for sample in epoch)


# One corpus


@settings(max_examples=40)
@given(
    num_samples=st.integers(1, 10_000),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10**6),
    purpose=st.sampled_from(["train", "valid"]),
)
def test_any_epoch_is_a_permutation(num_samples, seed, epoch, purpose):
    samples = epoch_of(num_samples, seed=seed, epoch=epoch, purpose=purpose)
    assert samples.dtype == np.int64
    np.testing.assert_array_equal(np.sort(samples), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [10**12, 2**40 + 1, 2**62 - 57])
def test_huge_corpora_start_at_once_and_stay_in_range(num_samples):
    """B10. Anything built in proportion to the corpus would not fit into memory."""
    order = SampleOrder.of_one(num_samples, 1, "web")
    positions = np.concatenate([np.arange(20_000), num_samples - 1 - np.arange(20_000)])
    samples = order.samples_at(positions).sample
    assert samples.min() >= 0
    assert samples.max() < num_samples
    assert samples.max() > num_samples // 2
    assert len(np.unique(samples)) == len(samples)


def test_epochs_seeds_and_purposes_have_unrelated_orders():
    others = [
        epoch_of(1000),
        epoch_of(1000, epoch=1),
        epoch_of(1000, epoch=2),
        epoch_of(1000, seed=1235),
        epoch_of(1000, purpose="valid"),
        np.arange(1000),
    ]
    for first, second in itertools.combinations(others, 2):
        # Two random permutations agree in one place on average (Poisson): P(> 12) is 1e-10.
        assert (first == second).sum() <= 12


def test_known_values():
    """A change of the order changes every run in progress: it must not happen unnoticed."""
    assert epoch_of(10).tolist() == [2, 8, 7, 1, 6, 9, 3, 0, 5, 4]
    assert epoch_of(10, epoch=1).tolist() == [5, 4, 3, 9, 6, 0, 1, 2, 8, 7]
    big = SampleOrder.of_one(10**12, 42, "web", "valid").samples_at(np.arange(3))
    assert big.sample.tolist() == [739304953231, 594107532572, 181637406685]
    assert big.corpus.tolist() == [0, 0, 0]
    blended = SampleOrder(
        [Segment(0, (1, 2), (50, 60), 8), Segment(4, (2, 1), (25, 30), 16)], 1234, NAMES[:2]
    )
    assert pairs_of(blended.samples_at(np.arange(8))) == [
        *((1, 26), (0, 43), (0, 10), (1, 53)),
        *((0, 19), (0, 3), (0, 22), (1, 17)),
    ]


# Several corpora and segments


@settings(max_examples=25)
@given(segments_of(), st.integers(0, 6000), st.integers(0, 2**63 - 1))
def test_every_corpus_is_read_epoch_by_epoch_through_all_changes_of_weights(segments, end, seed):
    """Nothing is lost and nothing comes twice before all else has come once."""
    order = order_of(segments, seed)
    drawn = order.samples_at(np.arange(end))
    for corpus, size in enumerate(segments[0].num_samples):
        assert_epochs(drawn.sample[drawn.corpus == corpus].tolist(), size)
    counts = np.bincount(drawn.corpus, minlength=len(order.names))
    assert order.draws_before(end) == tuple(counts)


@settings(max_examples=25)
@given(segments_of(lengths=(8, 16)))
def test_a_new_sequence_length_begins_a_new_pass(segments):
    order = order_of(segments)
    ends = [*(segment.start for segment in segments[1:]), segments[-1].start + 1000]
    since = [[] for _ in order.names]
    for number, (segment, end) in enumerate(zip(segments, ends, strict=True)):
        if number and segment.seq_length != segments[number - 1].seq_length:
            since = [[] for _ in order.names]
        for corpus, sample in pairs_of(order.samples_at(np.arange(segment.start, end))):
            assert segment.weights[corpus] > 0
            since[corpus].append(sample)
        for samples, size in zip(since, segment.num_samples, strict=True):
            assert_epochs(samples, size)


def test_passes_of_one_length_have_unrelated_orders():
    segments = [
        Segment(start, (1,), (1000 * 8 // length,), length)
        for start, length in ((0, 8), (1000, 4), (3000, 8))
    ]
    order = SampleOrder(segments, 5, ["web"])
    first, second = (order.samples_at(np.arange(p, p + 1000)).sample for p in (0, 3000))
    assert (first == second).sum() <= 12
    assert order.draws_before(3500) == (3500,)


@settings(max_examples=25)
@given(segments_of(lengths=(8, 16)), st.data())
def test_the_shares_of_a_segment_are_exact_at_the_ends_of_its_blocks(segments, data):
    order = order_of(segments)
    number = data.draw(st.integers(0, len(segments) - 1))
    start, weights = segments[number].start, segments[number].weights
    end = segments[number + 1].start if number + 1 < len(segments) else start + 2**40
    length = (end - start) // 1024 * 1024
    before, after = order.draws_before(start), order.draws_before(start + length)
    if number and weights == segments[number - 1].weights:
        return  # it goes on with the blocks of the segment before it
    for weight, low, high in zip(weights, before, after, strict=True):
        share = Fraction(str(weight)) / sum(Fraction(str(other)) for other in weights)
        assert abs(high - low - share * length) < 1


@settings(max_examples=25)
@given(segments_of(lengths=(8, 16)), st.lists(st.integers(0, 3500), max_size=50))
def test_what_is_read_depends_on_the_position_alone(segments, positions):
    """In any order, any number at once, in any shape, by a longer run or a shorter one."""
    whole = order_of(segments).samples_at(np.arange(3501))
    order = order_of(segments)
    places = np.array(positions, dtype=np.int64)
    for shaped in (places, places.reshape(-1, 1), np.zeros((0, 3), dtype=np.int64)):
        found = order.samples_at(shaped)
        assert found.corpus.dtype == found.sample.dtype == np.int64
        np.testing.assert_array_equal(found.corpus, whole.corpus[shaped])
        np.testing.assert_array_equal(found.sample, whole.sample[shaped])


@settings(max_examples=25)
@given(segments_of(lengths=(8, 16), most=5), st.data())
def test_later_segments_leave_what_was_read(segments, data):
    kept = data.draw(st.integers(1, len(segments)))
    end = segments[kept].start if kept < len(segments) else 3500
    short, long = order_of(segments[:kept]), order_of(segments)
    assert_equal(short.samples_at(np.arange(end)), long.samples_at(np.arange(end)))
    assert short.draws_before(end) == long.draws_before(end)
    assert short.segment_at(end - 1) == long.segment_at(end - 1) == kept - 1


def phase(from_samples, weights, seq_length=8, size=300):
    samples = dict.fromkeys(weights, size // seq_length * 8)
    return SimpleNamespace(
        from_samples=from_samples, weights=weights, samples=samples, seq_length=seq_length
    )


def named(order, end):
    drawn = order.samples_at(np.arange(end))
    return [(order.names[corpus], sample) for corpus, sample in pairs_of(drawn)]


@pytest.mark.parametrize("begun", [{"web": 1}, {"web": 0.5, "math": 2, "code": 1}])
@pytest.mark.parametrize("seq_length", [8, 16])
def test_corpora_of_a_later_phase_leave_what_was_read(begun, seq_length):
    """A run goes on with new data, whatever the names and their order in the file."""
    short = named(SampleOrder.of_phases([phase(0, begun)], 7), 700)
    more = {"zoo": 1, "web": 1, "art": 3}
    for first in (begun, dict(reversed(begun.items())), begun | dict.fromkeys(more, 0) | begun):
        phases = [phase(0, first), phase(700, more, seq_length)]
        long = named(SampleOrder.of_phases(phases, 7), 1500)
        assert long[:700] == short
        assert {name for name, _ in long[700:]} == set(more)


def test_a_run_that_begins_with_one_corpus_has_the_order_of_that_corpus_alone():
    segments = [Segment(0, (0, 1, 0), (90, 100, 110), 8), Segment(70, (2, 1, 1), (90, 100, 110), 8)]
    order = order_of(segments, 1234)
    drawn = order.samples_at(np.arange(2000))
    assert drawn.corpus[:70].tolist() == [1] * 70
    alone = SampleOrder.of_one(100, 1234, "other name")
    mine = drawn.sample[drawn.corpus == 1]
    np.testing.assert_array_equal(mine, alone.samples_at(np.arange(len(mine))).sample)


def test_corpora_of_one_size_have_unrelated_orders():
    order = SampleOrder([Segment(0, (1, 1, 1), (1000,) * 3, 8)], 5, NAMES)
    drawn = order.samples_at(np.arange(4000))
    firsts = [drawn.sample[drawn.corpus == corpus][:1000] for corpus in range(3)]
    for first, second in itertools.combinations(firsts, 2):
        assert (first == second).sum() <= 12


@settings(max_examples=25)
@given(segments_of(), st.integers(1, 3400))
def test_a_segment_that_changes_nothing_changes_nothing(segments, start):
    """A phase that only changes the micro batch, say."""
    if start in [segment.start for segment in segments]:
        return
    order = order_of(segments)
    cut = order.segment_at(start)
    same = segments[cut]
    again = Segment(start, same.weights, same.num_samples, same.seq_length)
    other = order_of([*segments[: cut + 1], again, *segments[cut + 1 :]])
    assert_equal(order.samples_at(np.arange(3500)), other.samples_at(np.arange(3500)))
    assert order.draws_before(3500) == other.draws_before(3500)
    assert other.segment_at(start) == other.segment_at(start - 1) + 1 == cut + 1


def test_far_positions_stay_exact():
    """B10: blended, near 2^61, in epochs far beyond 2^31."""
    sizes = (7, 10**12, 2**40)
    segments = [Segment(0, (1, 0, 0), sizes, 8), Segment(2**40 + 1, (3, 1, 2), sizes, 8)]
    order = order_of(segments)
    start = 2**61
    drawn = order.samples_at(np.arange(start, start + 3000))
    before, after = order.draws_before(start), order.draws_before(start + 3000)
    assert sum(before) == start
    assert before[0] == pytest.approx(2**40 + (start - 2**40) / 2, rel=1e-12)
    alone = SampleOrder.of_one(7, 5, "web")
    mine = alone.samples_at(np.arange(before[0], after[0], dtype=np.int64)).sample
    np.testing.assert_array_equal(drawn.sample[drawn.corpus == 0], mine)
    for corpus in (1, 2):
        samples = drawn.sample[drawn.corpus == corpus]
        assert len(samples) == after[corpus] - before[corpus] == len(np.unique(samples))
        assert sizes[corpus] // 2 < samples.max() < sizes[corpus]


@pytest.mark.parametrize(
    "weights", [(0.999, 0.001), (0.001, 0.999), (1, 1), (1,), (1, 1e-9), (5, 1, 1, 1, 1, 1)]
)
@pytest.mark.parametrize("samples", [1, 2, 7, 1000, 5000])
def test_no_corpus_is_read_past_its_end(weights, samples):
    """B17: small and large corpora, drawn often or never, to the last step of the run."""
    sizes = (3, 200, 1, 2, 5, 9)[: len(weights)]
    order = SampleOrder([Segment(0, weights, sizes, 8)], 5, [f"c{size}" for size in sizes])
    drawn = order.samples_at(np.arange(samples))
    counts = order.draws_before(samples)
    assert sum(counts) == samples
    for corpus, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        mine = drawn.sample[drawn.corpus == corpus].tolist()
        assert len(mine) == count
        assert_epochs(mine, size)
        times = Counter(mine)
        assert {times[sample] for sample in range(size)} <= {count // size, -(-count // size)}


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([], "must begin at 0"),
        ([Segment(1, (1,), (1,), 8)], "must begin at 0"),
        ([Segment(0, (1,), (1,), 8)] * 2, "a segment at 0 cannot follow one at 0"),
        ([Segment(0, (1,), (0,), 8)], "web has a weight of 1 but no sample"),
        (
            [Segment(0, (1,), (5,), 8), Segment(9, (2,), (6,), 8)],
            "web has 6 samples here and 5 before",
        ),
        ([Segment(0, (0,), (5,), 8)], "at least one must be positive"),
    ],
)
def test_segments_that_are_no_order_are_refused(segments, says):
    """B15: above all a corpus without a sample, which no epoch could ever fill."""
    with pytest.raises(ValueError, match=says):
        SampleOrder(segments, 5, ["web"])


def test_a_corpus_without_a_sample_may_stand_by():
    order = order_of([Segment(0, (1, 0), (3, 0), 8), Segment(5, (1, 1), (3, 4), 8)])
    assert order.draws_before(5) == (5, 0)
    assert set(order.samples_at(np.arange(5)).corpus.tolist()) == {0}

"""Samples of a blend: the tokens at a position are those of the corpus and sample drawn there."""

import numpy as np
import pytest

from lib.data.blended_samples import BlendedSamples
from lib.data.order import SampleOrder, Segment
from lib.data.samples import SampleWindows
from lib.data.splits import whole_split
from tests.data.tiny_corpus import open_corpus

LENGTHS = ((9, 1, 30, 17), (5,) * 12)  # tokens of the documents of two corpora
SEQ_LENGTHS = (4, 4, 8)  # of three segments
STARTS = (0, 20, 50)
WEIGHTS = ((1, 1), (1, 5), (2, 1))


@pytest.fixture(scope="module")
def streams():
    """Tokens of each corpus and the document that each token is in."""
    return [
        (100 * (corpus + 1) + np.arange(sum(lengths)), np.repeat(np.arange(len(lengths)), lengths))
        for corpus, lengths in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def samples(tmp_path_factory, streams):
    corpora = [
        open_corpus(tmp_path_factory.mktemp("corpus"), np.split(tokens, np.cumsum(lengths)[:-1]))
        for (tokens, _), lengths in zip(streams, LENGTHS, strict=True)
    ]
    windows = [
        [SampleWindows(corpus, whole_split(corpus, length), length) for corpus in corpora]
        for length in SEQ_LENGTHS
    ]
    segments = [
        Segment(start, weights, tuple(corpus.num_samples for corpus in row), length)
        for start, weights, row, length in zip(STARTS, WEIGHTS, windows, SEQ_LENGTHS, strict=True)
    ]
    return BlendedSamples(windows, SampleOrder(segments, 5, ["web", "code"]))


@pytest.mark.parametrize(("first", "last", "length"), [(0, 20, 4), (20, 50, 4), (50, 120, 8)])
def test_tokens_and_document_starts_are_those_of_the_sample_drawn(
    samples, streams, first, last, length
):
    positions = np.random.default_rng(first).permutation(np.arange(first, last))
    rows, starts = samples.windows_at(positions), samples.starts_at(positions)
    assert rows.dtype == np.int64
    assert rows.shape == (last - first, length + 1)
    drawn = samples.order.samples_at(positions)
    assert set(drawn.corpus.tolist()) == {0, 1}
    for place, (corpus, sample) in enumerate(zip(drawn.corpus, drawn.sample, strict=True)):
        tokens, owners = streams[corpus]
        inside = slice(sample * length, sample * length + length + 1)
        np.testing.assert_array_equal(rows[place], tokens[inside])
        np.testing.assert_array_equal(starts[place], np.flatnonzero(np.diff(owners[inside])) + 1)


def test_an_epoch_gives_every_token_that_a_window_holds_once(samples, streams):
    """In the last segment's pass, of both corpora: no sample lost, none twice."""
    order = samples.order
    for corpus, (tokens, _) in enumerate(streams):
        positions = np.arange(50, 200)
        mine = positions[order.samples_at(positions).corpus == corpus]
        labels = samples.windows_at(mine[: order.segments[2].num_samples[corpus]])[:, 1:]
        read = (len(tokens) - 1) // 8 * 8
        assert sorted(labels.reshape(-1).tolist()) == tokens[1 : read + 1].tolist()


def test_fillers_are_zeros_in_which_no_document_begins(samples):
    positions = np.array([-1, 60, -1])
    rows = samples.windows_at(positions)
    assert rows[[0, 2]].tolist() == [[0] * 9] * 2
    np.testing.assert_array_equal(rows[1], samples.windows_at(np.array([60]))[0])
    starts = samples.starts_at(positions)
    assert starts[0].tolist() == starts[2].tolist() == []
    drawn = samples.drawn(positions)
    assert (drawn.corpus[0], drawn.sample[2]) == (-1, -1)
    assert drawn.sample[1] == samples.order.samples_at(np.array(60)).sample
    assert samples.windows_at(np.array([-1])).tolist() == [[0] * 5]


def test_positions_of_several_segments_are_refused(samples):
    for positions in ([19, 20], [60, 3]):
        with pytest.raises(ValueError, match="are in several segments"):
            samples.windows_at(np.array(positions))


def test_samples_that_the_order_was_not_made_for_are_refused(samples):
    """B17: a corpus with fewer samples than it is drawn from."""
    (web, code), *_ = samples._windows
    order = SampleOrder([Segment(0, (1, 1), (web.num_samples, 15), 4)], 5, ["web", "code"])
    with pytest.raises(ValueError, match=r"there are \(14, 14\) samples, not \(14, 15\)"):
        BlendedSamples([[web, code]], order)

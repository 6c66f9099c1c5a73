"""Samples: sample k is tokens [k S, k S + S + 1) of a split's documents put one after another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.samples import SampleWindows
from lib.data.splits import describe_splits
from tests.data.tiny_corpus import open_corpus


def windows_of(corpus, split, name, seq_length):
    facts = describe_splits(corpus, split, seq_length)[name]
    return SampleWindows(corpus, facts, seq_length)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    split=st.sampled_from(["1,0,0", "90,5,5", "2,1,1", "1,1,1", "0,1,1"]),
    seq_length=st.integers(1, 17),
    dtype=st.sampled_from([np.uint16, np.int32]),
    parts=st.integers(1, 4),
)
def test_windows_are_slices_of_the_documents(
    tmp_path_factory, lengths, split, seq_length, dtype, parts
):
    """Tokens and beginnings of documents, whatever the number of parts."""
    generator = np.random.default_rng(sum(lengths))
    documents = [generator.integers(0, 60_000, length) for length in lengths]
    folder = tmp_path_factory.mktemp("corpus")
    corpus = open_corpus(folder, documents, dtype=dtype, parts=parts)
    for name in ("train", "valid", "test"):
        facts = describe_splits(corpus, split, seq_length)[name]
        first, last = facts.documents
        stream = np.concatenate([np.zeros(0, dtype=np.int64), *documents[first:last]])
        owners = np.repeat(np.arange(first, last), lengths[first:last])
        windows = SampleWindows(corpus, facts, seq_length)
        assert windows.num_samples == max(0, (len(stream) - 1) // seq_length)
        for sample in range(windows.num_samples):
            start = sample * seq_length
            window = windows.window(sample)
            assert window.dtype == np.int64
            np.testing.assert_array_equal(window, stream[start : start + seq_length + 1])
            changes = np.flatnonzero(np.diff(owners[start : start + seq_length + 1])) + 1
            np.testing.assert_array_equal(windows.starts(sample), changes)


def test_documents_begin_where_the_index_says(tmp_path):
    """B20: not after each end-of-document token, which text may repeat or lack; and a document
    that begins with the label alone counts."""
    documents = [[5, 6, 0], [7, 0, 0], [8], [], [9, 1]]
    windows = windows_of(open_corpus(tmp_path, documents), "1", "train", 4)
    assert windows.num_samples == 2
    assert windows.starts(0).tolist() == [3]
    assert windows.window(1).tolist() == [0, 0, 8, 9, 1]
    assert windows.starts(1).tolist() == [2, 3]
    assert windows.position(1) == 4


def test_a_document_that_begins_at_either_end(tmp_path):
    windows = windows_of(open_corpus(tmp_path, [range(4), range(4), range(5)]), "1", "train", 4)
    assert [windows.starts(sample).tolist() for sample in range(3)] == [[4], [4], []]


@pytest.mark.parametrize("seq_length", [1, 2, 8])
@pytest.mark.parametrize("extra", ["1", "S-1", "S", "S+1", "2S", "2S+1"])
def test_ragged_token_counts(tmp_path, seq_length, extra):
    """B15: token counts about one and two samples give 0, 0, 0, 1, 1 and 2 samples."""
    tokens, samples = {
        "1": (1, 0),
        "S-1": (seq_length - 1, 0),
        "S": (seq_length, 0),
        "S+1": (seq_length + 1, 1),
        "2S": (2 * seq_length, 1),
        "2S+1": (2 * seq_length + 1, 2),
    }[extra]
    if seq_length == 1:
        samples = max(0, tokens - 1)
    windows = windows_of(open_corpus(tmp_path, [range(tokens)]), "1", "train", seq_length)
    assert windows.num_samples == samples
    for sample in range(samples):
        assert windows.window(sample).tolist() == list(
            range(sample * seq_length, (sample + 1) * seq_length + 1)
        )
    for outside in (-1, samples, samples + 5):
        for method in (windows.window, windows.starts):
            with pytest.raises(IndexError, match=f"sample {outside} of {samples}"):
                method(outside)


@pytest.mark.parametrize("tokens", [25, 26, 28])
def test_every_token_but_the_first_is_a_label_exactly_once(tmp_path, tokens):
    windows = windows_of(open_corpus(tmp_path, [range(9), range(9, tokens)]), "1", "train", 4)
    labels = np.concatenate([windows.window(k)[1:] for k in range(windows.num_samples)])
    # What does not fill a last window is not read.
    assert labels.tolist() == list(range(1, 4 * ((tokens - 1) // 4) + 1))
    inputs = np.concatenate([windows.window(k)[:-1] for k in range(windows.num_samples)])
    np.testing.assert_array_equal(inputs, labels - 1)


def test_several_windows_and_fillers(tmp_path):
    windows = windows_of(open_corpus(tmp_path, [range(1, 14)]), "1", "train", 4)
    rows = windows.windows(np.array([2, -1, 0, 2]))
    assert rows.dtype == np.int64
    assert rows.tolist() == [
        [9, 10, 11, 12, 13],
        [0, 0, 0, 0, 0],
        [1, 2, 3, 4, 5],
        [9, 10, 11, 12, 13],
    ]
    assert windows.windows(np.zeros(0, dtype=np.int64)).shape == (0, 5)


def test_large_token_ids_of_uint16_do_not_turn_negative(tmp_path):
    windows = windows_of(open_corpus(tmp_path, [[65_535, 40_000, 0]]), "1", "train", 2)
    assert windows.window(0).tolist() == [65_535, 40_000, 0]

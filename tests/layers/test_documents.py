"""Where documents lie: a case written by hand, and any case by counting token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.layers.documents import DocumentLayout, document_positions, find_documents

# a b E c d E E f, with E the end of a document: "a b E", "c d E", "E" and the beginning of another.
_STARTS = [np.array([3, 6, 7])]
_ATTENDS = """
    1 . . . . . . .
    1 1 . . . . . .
    1 1 1 . . . . .
    . . . 1 . . . .
    . . . 1 1 . . .
    . . . 1 1 1 . .
    . . . . . . 1 .
    . . . . . . . 1
"""


def test_a_sequence_written_by_hand():
    """B20."""
    assert document_positions(_STARTS, 8).T.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    documents = find_documents(_STARTS, 8)
    assert documents.number_SB.T.tolist() == [[0, 0, 0, 1, 1, 1, 2, 3]]
    assert documents.offsets.tolist() == [0, 3, 6, 7, 8]
    assert documents.longest == 3
    expected = [[sign == "1" for sign in row.split()] for row in _ATTENDS.strip().splitlines()]
    assert documents.allowed().tolist() == [[expected]]


def test_without_a_border_a_sequence_is_one_document():
    none = [np.array([], dtype=np.int64)]
    assert document_positions(none, 4).T.tolist() == [[0, 1, 2, 3]]
    documents = find_documents(none, 4)
    assert documents.offsets.tolist() == [0, 4]
    assert torch.equal(documents.allowed()[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())


@given(st.data())
def test_counted_token_by_token(data):
    length, rows = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    # A place may be named twice, and the last one, of the label alone, is no input's.
    places = st.lists(st.integers(0, length), max_size=6)
    starts = [np.array(data.draw(places), dtype=np.int64) for _ in range(rows)]
    documents = find_documents(starts, length)
    positions = document_positions(starts, length)
    assert (positions.dtype, positions.is_contiguous()) == (torch.int64, True)
    assert (documents.number_SB.dtype, documents.number_SB.is_contiguous()) == (torch.int32, True)
    assert documents.offsets.dtype == torch.int32
    pieces = []
    for row in range(rows):
        number = place = -1
        for token in range(length):
            begins = token == 0 or token in starts[row]
            number, place = number + begins, 0 if begins else place + 1
            assert documents.number_SB[token, row] == number
            assert positions[token, row] == place
            if begins:
                pieces.append(0)
            pieces[-1] += 1
    assert documents.offsets.diff().tolist() == pieces
    assert documents.longest == max(pieces)


@pytest.mark.parametrize("positions", [None, document_positions(_STARTS, 8)])
@pytest.mark.parametrize("documents", [None, find_documents(_STARTS, 8)])
def test_moving_keeps_everything(positions, documents):
    moved = DocumentLayout(positions, documents).to(torch.device("cpu"))
    assert moved.positions_SB is positions
    if documents is None:
        assert moved.documents is None
        return
    assert moved.documents.longest == documents.longest
    assert torch.equal(moved.documents.number_SB, documents.number_SB)
    assert torch.equal(moved.documents.offsets, documents.offsets)

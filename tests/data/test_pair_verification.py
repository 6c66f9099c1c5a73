"""What opening leaves out: each entry of the index, each token."""

import hashlib

import numpy as np
import pytest

from lib.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from lib.data.pair_verification import verify_index, verify_pair
from lib.errors import UserError
from tests.data.tiny_corpus import write_pair

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10], [65499]]


def damage(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("chunk", [1, 4, 1 << 20])
def test_a_good_pair_gives_its_checksums_and_counts(tmp_path, monkeypatch, dtype, chunk):
    monkeypatch.setattr("lib.data.pair_verification._CHUNK", chunk)
    pair, read = write_pair(tmp_path / "p", DOCUMENTS, dtype), []
    contents = verify_pair(pair, 65500, read.append)
    for ending, found in (("bin", contents.bin_sha256), ("idx", contents.idx_sha256)):
        data = (tmp_path / f"p.{ending}").read_bytes()
        assert found == hashlib.sha256(data).hexdigest()
    tokens = [token for document in DOCUMENTS for token in document]
    assert contents.token_counts.tolist() == [tokens.count(number) for number in range(65500)]
    assert sum(read) == (tmp_path / "p.bin").stat().st_size


def test_an_empty_pair_is_good(tmp_path):
    assert verify_pair(write_pair(tmp_path / "p", []), 10).token_counts.sum() == 0


# 5 sequences and 6 documents: lengths from byte 34 on, pointers from 54, documents from 94.
@pytest.mark.parametrize(
    ("offset", "data"),
    [(54 + 8 * 2, b"\x01"), (94 + 8 * 2, b"\x05"), (34 + 4, b"\x02"), (34 + 7, b"\x80")],
)
@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_damage_inside_the_index_is_found(tmp_path, monkeypatch, offset, data, chunk):
    monkeypatch.setattr("lib.data.pair_verification._CHUNK", chunk)
    write_pair(tmp_path / "p", DOCUMENTS)
    damage(tmp_path / "p.idx", offset, data)
    with pytest.raises(UserError, match=r"p\.idx"):
        verify_index(IndexedDataset(tmp_path / "p"))


@pytest.mark.parametrize(
    ("dtype", "token", "vocab_size"), [(np.uint16, 65499, 65499), (np.int32, -1, 70_000)]
)
def test_a_token_outside_the_vocabulary_is_named(tmp_path, monkeypatch, dtype, token, vocab_size):
    monkeypatch.setattr("lib.data.pair_verification._CHUNK", 4)
    with IndexedDatasetWriter(tmp_path / "p", dtype) as writer:
        for document in [*DOCUMENTS[:-1], [3, token, 4]]:
            writer.add_document(np.array(document))
    message = rf"p\.bin: token {token} at position 11 \(document 5\).*0 to {vocab_size - 1}"
    with pytest.raises(UserError, match=message):
        verify_pair(IndexedDataset(tmp_path / "p"), vocab_size)

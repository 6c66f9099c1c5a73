"""The writer against Megatron's builder, byte for byte, and each reader on the other's files."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    bin_path,
    byte_pointers,
    dtype_for_vocab,
    idx_path,
    write_index,
)
from lib.data.pair_verification import verify_index
from lib.errors import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

# Each document is a list of sequences, each sequence a list of tokens; [] is an empty document.
DOCUMENTS = [[[1, 2, 3]], [], [[4], [5, 6], [7, 8, 9, 10]], [[65499]], [], []]


def write_ours(prefix, documents, dtype):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            tokens = np.array([t for sequence in document for t in sequence], dtype=np.int64)
            writer.add_document(tokens, [len(sequence) for sequence in document])


def write_theirs(prefix, documents, dtype):
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(idx_path(prefix)))


def both(prefix):
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


documents_strategy = st.lists(
    st.lists(st.lists(st.integers(0, 65499), min_size=1, max_size=5), max_size=4), max_size=8
)
# Megatron's builder also takes sequences of no token; ours refuses to write them.
foreign_documents = st.lists(
    st.lists(st.lists(st.integers(0, 65499), max_size=3), max_size=3), max_size=8
)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@settings(deadline=None, max_examples=40)
@given(documents=documents_strategy)
def test_same_bytes_as_megatron(tmp_path_factory, dtype, documents):
    folder = tmp_path_factory.mktemp("pair")
    write_ours(folder / "ours", documents, dtype)
    write_theirs(folder / "theirs", documents, dtype)
    assert both(folder / "ours") == both(folder / "theirs")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_reads_ours(tmp_path, dtype):
    write_ours(tmp_path / "ours", DOCUMENTS, dtype)
    theirs = MegatronDataset(str(tmp_path / "ours"))
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    assert [theirs[i].tolist() for i in range(len(theirs))] == sequences
    assert theirs.document_indices.tolist() == [0, 1, 1, 4, 5, 5, 5]
    assert theirs.index.dtype == dtype


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8, np.int64])
def test_we_read_megatrons(tmp_path, dtype):
    """The type is the header's, also one that Megatron's tools would not choose."""
    documents = [[[t % 256 for t in sequence] for sequence in d] for d in [*DOCUMENTS, [[], [8]]]]
    write_theirs(tmp_path / "theirs", documents, dtype)
    ours = IndexedDataset(tmp_path / "theirs")
    sequences = [sequence for document in documents for sequence in document]
    assert [ours[i].tolist() for i in range(len(ours))] == sequences
    assert ours.dtype == dtype
    assert ours.num_documents == len(documents)
    assert ours.tokens.tolist() == [t for sequence in sequences for t in sequence]
    assert ours[-1].tolist() == sequences[-1]
    verify_index(ours)


def test_reads_megatrons_multimodal_index(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32, multimodal=True)
    builder.add_item(torch.tensor([1, 2]), mode=1)
    builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    assert IndexedDataset(tmp_path / "m")[0].tolist() == [1, 2]


@pytest.mark.parametrize("vocab_size", [300, 65499, 65500, 65536, 100_000])
def test_dtype_as_megatrons(vocab_size):
    assert dtype_for_vocab(vocab_size) == DType.optimal_dtype(vocab_size)


@settings(deadline=None, max_examples=60)
@given(documents=foreign_documents)
def test_where_documents_begin(tmp_path_factory, documents):
    """Against counting, on Megatron's own files with empty documents and empty sequences."""
    prefix = tmp_path_factory.mktemp("pair") / "p"
    write_theirs(prefix, documents, np.uint16)
    dataset = IndexedDataset(prefix)
    sizes = [sum(map(len, document)) for document in documents]
    starts = [sum(sizes[:d]) for d in range(len(documents) + 1)]
    assert [dataset.document_start(d) for d in range(len(documents) + 1)] == starts
    owners = [d for d, size in enumerate(sizes) for _ in range(size)]
    assert [dataset.document_at(t) for t in range(len(owners))] == owners
    filled = sorted({starts[d] for d, size in enumerate(sizes) if size})
    for d in range(len(starts)):
        assert dataset.document_edges(d, len(documents)).tolist() == starts[d:]
        assert dataset.document_edges(0, d).tolist() == starts[: d + 1]
    for first in range(-2, len(owners) + 1):
        for last in (first, first + 1, first + 3, len(owners)):
            found = dataset.document_starts(first, last)
            assert found.dtype == np.int64
            assert found.tolist() == [start for start in filled if first < start < last]
    for wrong in (-1, len(documents) + 1):
        with pytest.raises(IndexError):
            dataset.document_start(wrong)
    for wrong in (-1, len(owners)):
        with pytest.raises(IndexError):
            dataset.document_at(wrong)


def test_pairs_merged_by_megatron_are_the_whole(tmp_path):
    """B12: the second part's document boundaries move by the first part's sequences."""
    first, second = DOCUMENTS, [[], [[8, 9], [7]], *DOCUMENTS]
    write_ours(tmp_path / "a", first, np.uint16)
    write_ours(tmp_path / "b", second, np.uint16)
    write_ours(tmp_path / "whole", first + second, np.uint16)
    builder = IndexedDatasetBuilder(str(tmp_path / "merged.bin"), dtype=np.uint16)
    for part in ("a", "b"):
        builder.add_index(str(tmp_path / part))
    builder.finalize(str(tmp_path / "merged.idx"))
    assert both(tmp_path / "merged") == both(tmp_path / "whole")


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_an_index_of_one_sequence_a_document(tmp_path, monkeypatch, chunk):
    """What the tokenizing stage writes: the boundaries are the numbers themselves."""
    monkeypatch.setattr("lib.data.indexed_dataset._CHUNK", chunk)
    write_theirs(tmp_path / "theirs", [[[1, 2, 3]], [[4]], [[5, 6]]], np.uint16)
    with (tmp_path / "lengths").open("w+b") as lengths:
        lengths.write(np.array([3, 1, 2], dtype="<i4").tobytes())
        write_index(tmp_path / "ours.idx", np.dtype("<u2"), lengths)
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


def test_offsets_are_64_bits():
    """B10: NumPy keeps int32 + int as int32 and only warns when it wraps."""
    lengths = np.array([2**30, 2**30, 5], dtype=np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pointers = byte_pointers(lengths, 2)
        assert pointers.tolist() == [0, 2**31, 2**32]
        assert pointers.dtype == np.int64
        more = byte_pointers(lengths, 4, start=2**40)
        assert more.tolist() == [2**40, 2**40 + 2**32, 2**40 + 2**33]


def test_reads_beyond_4_gib(tmp_path):
    """B10 for the reader: a sparse .bin of 4 GiB and an index that Megatron's writer would give."""
    lengths = np.array([2**30, 2**30, 5], dtype="<i4")
    header = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08"
    header += np.array([3, 4], "<u8").tobytes()
    pointers = np.array([0, 2**31, 2**32], "<i8")
    documents = np.arange(4, dtype="<i8")
    idx_path(tmp_path / "big").write_bytes(
        header + lengths.tobytes() + pointers.tobytes() + documents.tobytes()
    )
    with bin_path(tmp_path / "big").open("wb") as file:
        file.seek(2**32)
        file.write(np.arange(1, 6, dtype="<u2").tobytes())
    dataset = IndexedDataset(tmp_path / "big")
    verify_index(dataset)
    assert dataset[2].tolist() == [1, 2, 3, 4, 5]
    assert dataset.document_start(2) == 2**31
    assert dataset.document_at(2**31 + 4) == 2
    assert dataset.num_tokens == 2**31 + 5


def test_pointers_across_pieces(tmp_path, monkeypatch):
    """The index is written in pieces; a small piece size shows any seam."""
    write_ours(tmp_path / "whole", DOCUMENTS * 7, np.int32)
    monkeypatch.setattr("lib.data.indexed_dataset._CHUNK", 3)
    write_ours(tmp_path / "pieces", DOCUMENTS * 7, np.int32)
    assert both(tmp_path / "whole") == both(tmp_path / "pieces")
    monkeypatch.setattr("lib.data.pair_verification._CHUNK", 3)
    verify_index(IndexedDataset(tmp_path / "pieces"))


def test_empty_dataset(tmp_path):
    write_ours(tmp_path / "none", [], np.uint16)
    dataset = IndexedDataset(tmp_path / "none")
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 0, 0)
    verify_index(dataset)


@pytest.mark.parametrize(
    ("tokens", "lengths"), [([1, 2], [2, 0]), ([1, 2], [1]), ([65536], [1]), ([-1], [1])]
)
def test_wrong_items_are_refused(tmp_path, tokens, lengths):
    with (
        pytest.raises(ValueError, match=r"length|fit"),
        IndexedDatasetWriter(tmp_path / "p", np.uint16) as writer,
    ):
        writer.add_document(np.array(tokens), lengths)
    assert not list(tmp_path.iterdir())


def test_failure_leaves_the_old_pair(tmp_path):
    write_ours(tmp_path / "p", DOCUMENTS, np.uint16)
    before = both(tmp_path / "p")

    def fail():
        with IndexedDatasetWriter(tmp_path / "p", np.uint16) as writer:
            writer.add_document(np.array([1]))
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert both(tmp_path / "p") == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.bin", "p.idx"]


def test_reading_goes_on_where_the_system_stopped(tmp_path, monkeypatch):
    """A read may give less than asked for: it always does beyond 2 GB."""
    write_ours(tmp_path / "p", DOCUMENTS, np.int32)
    dataset, preadv = IndexedDataset(tmp_path / "p"), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    for first in range(12):
        for last in range(first, 12):
            assert dataset.read(first, last).tolist() == dataset.tokens[first:last].tolist()


def test_a_file_cut_while_it_is_read(tmp_path):
    write_ours(tmp_path / "p", DOCUMENTS, np.uint16)
    dataset = IndexedDataset(tmp_path / "p")
    os.truncate(tmp_path / "p.bin", 9)
    with pytest.raises(UserError, match=r"p\.bin: was cut"):
        dataset.read(0, 11)


def test_files_are_closed(tmp_path):
    def opened():
        files = [file for file in Path("/proc/self/fd").iterdir() if file.exists()]
        return [file for file in files if str(tmp_path) in str(file.readlink())]

    write_ours(tmp_path / "p", DOCUMENTS, np.uint16)
    dataset = IndexedDataset(tmp_path / "p")
    assert opened()
    del dataset
    assert not opened()


def test_reading_never_writes(tmp_path):
    write_ours(tmp_path / "p", DOCUMENTS, np.uint16)
    dataset = IndexedDataset(tmp_path / "p")
    with pytest.raises(ValueError, match="read-only"):
        dataset.tokens[0] = 1


def damage(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("file", "offset", "data", "message"),
    [
        ("p.idx", 0, b"X", "no Megatron index"),
        ("p.idx", 9, b"\x02", "no Megatron index"),
        ("p.idx", 17, b"\x07", "type code 7"),
        ("p.idx", 18, b"\x06", "sequences"),
        ("p.idx", 26, b"\x00", "boundaries"),
        ("p.idx", 34 + 12 * 5, b"\x01", "documents run from"),
        ("p.idx", 34 + 4 * 4, b"\x02", r"p\.bin.*describes"),
        ("p.idx", 34 + 4 * 5, b"\x02", r"p\.bin.*describes"),
    ],
)
def test_damaged_files_are_refused(tmp_path, file, offset, data, message):
    write_ours(tmp_path / "p", DOCUMENTS, np.uint16)
    damage(tmp_path / file, offset, data)
    with pytest.raises(UserError, match=message):
        IndexedDataset(tmp_path / "p")


def test_half_a_token_is_refused(tmp_path):
    """The last pointer may agree with the size of the .bin, and both be wrong."""
    write_ours(tmp_path / "p", [[[1, 2]]], np.uint16)
    damage(tmp_path / "p.idx", 34, b"\x00\x00\x00\x00\x03")  # length 0 from byte 3 on
    (tmp_path / "p.bin").write_bytes(b"123")
    with pytest.raises(UserError, match=r"p\.bin.*3 bytes"):
        IndexedDataset(tmp_path / "p")


@pytest.mark.parametrize("file", ["p.bin", "p.idx"])
def test_cut_or_missing_files_are_refused(tmp_path, file):
    write_ours(tmp_path / "p", DOCUMENTS, np.uint16)
    whole = (tmp_path / file).read_bytes()
    for size in (len(whole) - 1, len(whole) - 2, 10, 0):
        (tmp_path / file).write_bytes(whole[:size])
        with pytest.raises(UserError, match=file):
            IndexedDataset(tmp_path / "p")
    (tmp_path / file).unlink()
    with pytest.raises(UserError, match=rf"{file}: not there"):
        IndexedDataset(tmp_path / "p")

"""A corpus in parts is the corpus in one; opening builds nothing, however many tokens there are."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.indexed_dataset import bin_path, idx_path
from lib.data.samples import SampleWindows
from lib.data.splits import whole_split
from lib.data.tokenized_corpus import TokenizedCorpus, sidecar_path
from lib.data.tokens_manifest import TokensManifest, TokensPart
from lib.errors import UserError
from tests.data.tiny_corpus import describe, open_corpus, write_corpus, write_pair

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10], [11]]


@settings(max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=10),
    parts=st.integers(1, 5),
    dtype=st.sampled_from([np.uint16, np.int32]),
)
def test_parts_are_one_corpus(tmp_path_factory, documents, parts, dtype):
    corpus = open_corpus(tmp_path_factory.mktemp("c"), documents, parts=parts, dtype=dtype)
    tokens = [token for document in documents for token in document]
    starts = [sum(map(len, documents[:d])) for d in range(len(documents) + 1)]
    owners = [d for d, document in enumerate(documents) for _ in document]
    filled = sorted({start for d, start in enumerate(starts[:-1]) if documents[d]})
    assert (corpus.num_tokens, corpus.num_documents) == (len(tokens), len(documents))
    assert corpus.dtype == dtype
    assert [corpus.document_start(d) for d in range(len(documents) + 1)] == starts
    assert [corpus.document_at(p) for p in range(len(tokens))] == owners
    for first in range(len(tokens) + 1):
        for last in {first, min(first + 4, len(tokens)), len(tokens)}:
            row = corpus.read(first, last)
            assert row.dtype == np.int64
            assert row.tolist() == tokens[first:last]
            found = corpus.document_starts(first, last)
            assert found.dtype == np.int64
            assert found.tolist() == [start for start in filled if first < start < last]
    corpus.verify()


def test_what_is_not_there_is_refused(tmp_path):
    corpus = open_corpus(tmp_path, DOCUMENTS, parts=2)
    for first, last in ((-1, 2), (3, 2), (0, 12), (12, 12)):
        for method in (corpus.read, corpus.document_starts):
            with pytest.raises(IndexError, match=f"tokens {first} to {last} of 11"):
                method(first, last)
    for outside in (-1, 7):
        with pytest.raises(IndexError):
            corpus.document_start(outside)
    for outside in (-1, 11):
        with pytest.raises(IndexError):
            corpus.document_at(outside)


def test_reading_gives_copies(tmp_path):
    corpus = open_corpus(tmp_path, DOCUMENTS)
    corpus.read(0, 4)[:] = 99
    assert corpus.read(0, 4).tolist() == [1, 2, 3, 4]


def test_the_header_tells_the_type_of_tokens(tmp_path):
    """Writers differ at vocabularies of 65,500 to 65,536; and some take int32 for all."""
    wide = open_corpus(tmp_path / "a", [[65_535, 40_000]], dtype=np.uint16, vocab_size=65_536)
    assert wide.read(0, 2).tolist() == [65_535, 40_000]
    assert open_corpus(tmp_path / "b", [[1, 2]], dtype=np.int32, vocab_size=300).dtype == np.int32


def test_parts_may_lie_anywhere(tmp_path):
    here = write_corpus(tmp_path / "here", DOCUMENTS)
    manifest = TokensManifest.load(here)
    (part,) = manifest.parts
    moved = part.model_copy(update={"prefix": str(tmp_path / "here" / part.prefix)})
    (tmp_path / "there").mkdir()
    manifest.model_copy(update={"parts": (moved,)}).write(tmp_path / "there" / "manifest.json")
    assert TokenizedCorpus.open(tmp_path / "there" / "manifest.json").read(0, 2).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("other", "dtype", "message"),
    [
        ([[1, 2, 3]], np.uint16, "documents 1, .* says 6"),
        ([*DOCUMENTS[:-1], [11, 12]], np.uint16, "tokens 12, .* says 11"),
        (DOCUMENTS, np.int32, "type of tokens int32, .* says uint16"),
    ],
)
def test_exchanged_files_are_refused(tmp_path, other, dtype, message):
    manifest = write_corpus(tmp_path, DOCUMENTS)
    write_pair(tmp_path / "corpus_text_document", other, dtype)
    with pytest.raises(UserError, match=f"corpus_text_document: {message}"):
        TokenizedCorpus.open(manifest)


def test_verify_finds_every_changed_byte(tmp_path):
    manifest = write_corpus(tmp_path, DOCUMENTS, parts=2)
    corpus = TokenizedCorpus.open(manifest)
    read = []
    corpus.verify(read.append)
    assert sum(read) == 2 * 11
    changed = bin_path(corpus.parts[1].prefix)
    data = changed.read_bytes()
    for place in range(len(data)):
        changed.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(UserError, match=r"corpus_text_document_01-of-02\.bin: its sha256"):
            TokenizedCorpus.open(manifest).verify()
    changed.write_bytes(data)
    # An index that is good in itself, but another one.
    write_pair(corpus.parts[0].prefix, [[1, 2], [3], [4]])
    with pytest.raises(UserError, match=r"corpus_text_document_00-of-02\.idx: its sha256"):
        TokenizedCorpus.open(manifest).verify()


def test_a_pair_without_manifest_is_refused_with_the_command(tmp_path):
    prefix = tmp_path / "theirs_text_document"
    with pytest.raises(UserError, match=r"theirs_text_document\.idx: not there"):
        TokenizedCorpus.open(sidecar_path(prefix))
    pair = write_pair(prefix, DOCUMENTS)
    command = re.escape(f"python -m stages.describe_tokens {prefix} --tokenizer")
    with pytest.raises(UserError, match=rf"{prefix}\.manifest\.json: .*{command}"):
        TokenizedCorpus.open(sidecar_path(prefix))
    describe(pair, 300).write(sidecar_path(prefix))
    assert TokenizedCorpus.open(sidecar_path(prefix)).num_documents == 6


# A thousand million documents: all empty but the last thousand, of about 10^9 tokens each.
DOCUMENTS_OF_ALL = 10**9
TOKENS_OF_ALL = 10**12
SEQ_LENGTH = 4096
SAMPLE = 10**8


def write_sparse_pair(prefix):
    """10^12 tokens: nearly all of both files are holes, which read as zeros."""
    start = SAMPLE * SEQ_LENGTH
    pointers = np.arange(1000, dtype="<i8") * 10**9
    pointers[410] = start + 7
    lengths = np.diff(pointers, append=TOKENS_OF_ALL).astype("<i4")
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * TOKENS_OF_ALL)
        file.seek(2 * start)
        file.write(np.arange(1, SEQ_LENGTH + 2, dtype="<u2").tobytes())
    empty, n = DOCUMENTS_OF_ALL - 1000, DOCUMENTS_OF_ALL
    with idx_path(prefix).open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08")
        file.write(np.array([n, n + 1], "<u8").tobytes())
        for offset, entries in (
            (34 + 4 * empty, lengths),
            (34 + 4 * n + 8 * empty, 2 * pointers),
            (34 + 12 * n + 8 * empty, np.arange(empty, n + 1, dtype="<i8")),
        ):
            file.seek(offset)
            file.write(entries.tobytes())


def resident_bytes(folder):
    """Bytes of the files in a folder that this process's maps have touched."""
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    found = [re.search(r"(?m)^Rss: +(\d+) kB", text) for text in maps if str(folder) in text]
    return sum(int(rss[1]) * 1024 for rss in found if rss)


def test_a_million_million_tokens_open_at_once(tmp_path):
    """B10, too: every number here is beyond 32 bits."""
    write_sparse_pair(tmp_path / "big")
    part = TokensPart(
        prefix="big",
        documents=DOCUMENTS_OF_ALL,
        tokens=TOKENS_OF_ALL,
        bin_sha256="0" * 64,
        idx_sha256="0" * 64,
    )
    small = TokensManifest.load(write_corpus(tmp_path / "small", DOCUMENTS))
    small.model_copy(update={"parts": (part,)}).write(tmp_path / "manifest.json")
    tracemalloc.start()
    corpus = TokenizedCorpus.open(tmp_path / "manifest.json")
    windows = SampleWindows(corpus, whole_split(corpus, SEQ_LENGTH), SEQ_LENGTH)
    window, starts = windows.window(SAMPLE), windows.starts(SAMPLE)
    document = corpus.document_at(TOKENS_OF_ALL - 1)
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.num_tokens == TOKENS_OF_ALL
    assert windows.num_samples == (TOKENS_OF_ALL - 1) // SEQ_LENGTH
    assert window.tolist() == list(range(1, SEQ_LENGTH + 2))
    assert starts.tolist() == [7]
    assert document == DOCUMENTS_OF_ALL - 1
    # Both files are 2 TB, an index of the samples would be GBs: a few pages of each were touched,
    # and no more than the window and the interpreter's own objects was allocated.
    assert 0 < resident_bytes(tmp_path) < 16 << 20
    assert allocated < 1 << 20
    for file in (bin_path(tmp_path / "big"), idx_path(tmp_path / "big")):
        file.unlink()

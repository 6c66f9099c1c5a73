"""Documents found again: by shard, frame and line, across parts, and where there is no raw text."""

import numpy as np
import pytest

from lib.data import provenance, shards
from lib.data.provenance import DocumentOrigins, RawDocuments, pieces_of, raw_manifest_of
from lib.data.shards import iter_raw_documents
from lib.data.tokenize import tokenize_corpus
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokens_manifest import MANIFEST_FILE
from lib.errors import UserError
from tests.data.raw_example import write_raw
from tests.data.tiny_corpus import open_corpus
from tests.data.tiny_tokenizer import save_tiny
from tests.data.tokenizing_example import Watcher, many_texts, small_shards, task_of

EMPTY, LONG = [], list(range(20, 41))


def test_any_document_of_a_raw_corpus_is_read_by_its_number(tmp_path, monkeypatch):
    raw = small_shards(tmp_path, monkeypatch)
    documents = list(iter_raw_documents(raw))
    found = RawDocuments(raw)
    assert [found.read(number) for number in range(len(documents))] == documents
    for number in (-1, len(documents)):
        with pytest.raises(IndexError, match=f"document {number} of {len(documents)}"):
            found.read(number)


def test_a_document_costs_one_frame(tmp_path, monkeypatch):
    """All other frames are spoilt; the one that holds the document is enough."""
    monkeypatch.setattr(shards, "_FRAME_BYTES", 20)
    texts = [f"text number {number}" for number in range(40)] + ["caf\u00e9 \u2028 \r\n end" * 9]
    shard = write_raw(tmp_path, texts).shards[0]
    assert len(shard.frames) == len(texts)
    path = tmp_path / shard.name
    whole = path.read_bytes()
    first = 0
    for number, size in enumerate(shard.frames):
        spoilt = bytearray(b"x" * len(whole))
        spoilt[first : first + size] = whole[first : first + size]
        path.write_bytes(bytes(spoilt))
        assert RawDocuments(tmp_path).read(number).text == texts[number]
        with pytest.raises(UserError, match=r"corpus-00000.*damaged.*download_corpus"):
            RawDocuments(tmp_path).read((number + 1) % len(texts))
        first += size
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="its manifest says"):
        RawDocuments(tmp_path).read(0)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_pieces_of_a_sample(tmp_path, parts):
    """Against the tokens' own documents; empty ones begin nowhere, also at a border of parts."""
    documents = [EMPTY, [1], [2, 3], EMPTY, EMPTY, [4, 5, 6], LONG, EMPTY, [7], EMPTY]
    corpus = open_corpus(tmp_path, documents, parts=parts)
    owner = [(n, place) for n, each in enumerate(documents) for place in range(len(each))]
    for start in range(corpus.num_tokens):
        for end in range(start + 1, corpus.num_tokens + 1):
            pieces = pieces_of(corpus, start, end)
            found = [
                (piece.document, place)
                for piece in pieces
                for place in range(piece.first, piece.last)
            ]
            assert found == owner[start:end]
            sizes = [piece.last - piece.first for piece in pieces]
            assert [piece.place for piece in pieces] == [0, *np.cumsum(sizes[:-1])]
            assert all(piece.length == len(documents[piece.document]) for piece in pieces)


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    """A corpus of which empty and short documents were left out, with its raw corpus."""
    folder = tmp_path_factory.mktemp("tokenized")
    tokenizer = save_tiny(folder / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        raw = small_shards(folder, patch)
    task = task_of(raw, folder / "tokenizer", folder / "tokens", min_document_tokens=20)
    manifest = tokenize_corpus(task, Watcher())
    assert manifest.empty_documents
    assert manifest.short_documents
    return folder, tokenizer


def origins_in(folder, raw):
    manifest = folder / "tokens" / MANIFEST_FILE
    corpus = TokenizedCorpus.open(manifest)
    return corpus, DocumentOrigins(corpus, manifest, raw, lambda ids: f"{len(ids)} ids")


def test_every_document_of_the_tokens_is_found_in_the_raw_corpus(tokenized):
    folder, tokenizer = tokenized
    corpus, origins = origins_in(folder, folder / "raw")
    assert origins.missing is None
    texts = many_texts()
    kept = [n for n, text in enumerate(texts) if len(tokenizer.encode(text)) >= 20]
    assert corpus.num_documents == len(kept)
    for document, number in enumerate(kept):
        assert origins.find(document) == (texts[number], "s", number + 1, number)


def test_without_a_raw_corpus_the_text_is_decoded_and_the_reason_told(tokenized, tmp_path):
    folder, _ = tokenized
    write_raw(tmp_path / "other", ["another corpus"])
    for raw, reason in (("none", "none is not there"), ("other", "other is another corpus than")):
        corpus, origins = origins_in(folder, tmp_path / raw)
        assert reason in origins.missing
        length = corpus.document_start(1)
        assert origins.find(0) == (f"{length} ids", None, None, None)
        assert raw_manifest_of(corpus, tmp_path / raw) is None
    pair = open_corpus(tmp_path / "pair", [[5, 6], [7]])
    origins = DocumentOrigins(pair, tmp_path, folder / "raw", str)
    assert "made elsewhere" in origins.missing
    assert origins.find(0).text == "[5, 6]"


def test_frames_are_not_kept_for_ever(tmp_path, monkeypatch):
    raw = small_shards(tmp_path, monkeypatch)
    found = RawDocuments(raw)
    for number in range(found.manifest.documents):
        found.read(number)
    assert found._frame.cache_info().currsize == provenance._CACHED_FRAMES

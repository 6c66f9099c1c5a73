"""Verifying reads all of a corpus: whatever is spoilt is named."""

import shutil

import numpy as np
import pytest

from lib.data import corpus_verification
from lib.data.corpus_verification import verify_corpus
from lib.data.indexed_dataset import bin_path, idx_path
from lib.data.manifest import read_manifest, write_manifest
from lib.data.tokenize import tokenize_corpus, tokenize_part
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokens_manifest import LEFT_OUT_FILE, MANIFEST_FILE, TokensManifest
from lib.data.tokens_parts import Part
from lib.errors import UserError
from tests.data.tiny_corpus import write_corpus
from tests.data.tiny_tokenizer import save_tiny
from tests.data.tokenizing_example import Watcher, small_shards, task_of


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    save_tiny(folder / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        raw = small_shards(folder, patch)
    task = task_of(raw, folder / "tokenizer", folder / "tokens", min_document_tokens=20)
    for part in Part(2, 0).all_of_count():
        tokenize_part(task, part, Watcher())
    tokenize_corpus(task, Watcher())
    return folder


@pytest.fixture
def folder(example, tmp_path):
    shutil.copytree(example, tmp_path / "copy")
    return tmp_path / "copy"


def verify(folder):
    manifest, read = folder / "tokens" / MANIFEST_FILE, []
    corpus = TokenizedCorpus.open(manifest)
    verify_corpus(corpus, manifest, folder / "raw", read.append)
    assert sum(read) == corpus.num_tokens * corpus.dtype.itemsize


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_what_is_right_passes(folder, monkeypatch, chunk):
    monkeypatch.setattr(corpus_verification, "_CHUNK", chunk)
    verify(folder)
    shutil.rmtree(folder / "raw")
    verify(folder)


def test_a_pair_made_elsewhere_passes(tmp_path):
    manifest = write_corpus(tmp_path / "tokens", [[1, 2], [], [3]])
    verify_corpus(TokenizedCorpus.open(manifest), manifest, tmp_path / "raw")


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_a_changed_byte_is_found_wherever_it_is(folder):
    for prefix in TokensManifest.load(folder / "tokens" / MANIFEST_FILE).prefixes(
        folder / "tokens" / MANIFEST_FILE
    ):
        for path, place in ((bin_path(prefix), 100), (idx_path(prefix), 40)):
            flip(path, place)
            with pytest.raises(UserError, match=path.name):
                verify(folder)
            flip(path, place)
    verify(folder)


@pytest.mark.parametrize("field", ["documents", "sequences", "tokens"])
def test_wrong_totals_are_found(folder, field):
    path = folder / "tokens" / MANIFEST_FILE
    manifest = TokensManifest.load(path)
    manifest.model_copy(update={field: getattr(manifest, field) + 1}).write(path)
    with pytest.raises(UserError, match=rf"manifest.json: [\d,]+ {field}, but its parts have"):
        verify(folder)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_wrong_numbers_of_documents_left_out_are_found(folder, monkeypatch, chunk):
    monkeypatch.setattr(corpus_verification, "_CHUNK", chunk)
    path = folder / "tokens" / LEFT_OUT_FILE
    right = np.load(path)
    swapped = right.copy()
    swapped[[3, 4]] = right[[4, 3]]
    beyond = np.append(right[:-1], 10**6)
    for wrong in (right[1:], swapped, np.append(right, right[-1] + 1)):
        np.save(path, wrong)
        with pytest.raises(UserError, match=rf"left_out.npy: must have {right.size} increasing"):
            verify(folder)
    for wrong in (beyond, np.insert(right[1:], 0, -1)):
        np.save(path, wrong)
        with pytest.raises(UserError, match=r"left_out.npy: its numbers must be 0 to"):
            verify(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"left_out.npy: cannot be read"):
        verify(folder)


def test_a_raw_corpus_of_other_counts_is_found(folder):
    raw = read_manifest(folder / "raw")
    write_manifest(folder / "raw", raw.model_copy(update={"documents": raw.documents + 1}))
    with pytest.raises(UserError, match=rf"raw has {raw.documents + 1:,}"):
        verify(folder)

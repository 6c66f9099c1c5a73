"""A pair made elsewhere is described once: all of it checked, what it cannot tell asked for."""

import hashlib

import numpy as np
import pytest
from click.testing import CliRunner

from lib.data.indexed_dataset import IndexedDatasetWriter, bin_path
from lib.data.pair_description import document_ends
from lib.data.tokenized_corpus import TokenizedCorpus, sidecar_path
from lib.data.tokenizer import load_tokenizer
from stages.describe_tokens import main
from tests.data.tiny_corpus import write_pair
from tests.data.tiny_tokenizer import EOD, save_tiny

TEXTS = ["The quick brown fox", "", "jumps over 12345 \u4e16\u754c", "dog"]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    save_tiny(folder)
    return folder


def write_foreign(prefix, tokenizer, dtype=np.int32, *, end=True):
    """As Megatron's preprocessing with --split-sentences: two sequences in the third document."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for text in TEXTS:
            ids = tokenizer.encode(text)
            ids += [tokenizer.eod_id] if end and ids else []
            lengths = [1, len(ids) - 1] if text.startswith("jumps") else None
            writer.add_document(np.array(ids, dtype=np.int64), lengths)


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_foreign_pair_becomes_a_corpus(tmp_path, tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    prefix = tmp_path / "theirs.v1_text_document"
    write_foreign(prefix, tokenizer)
    done = run(f"{prefix}.idx", "--tokenizer", tokenizer_folder, "--append-eod")
    assert done.exit_code == 0, done.output
    assert "The quick brown fox" in done.output
    corpus = TokenizedCorpus.open(sidecar_path(prefix))
    corpus.verify()
    manifest = corpus.manifest
    assert manifest.parts[0].prefix == prefix.name
    assert manifest.tokens_sha256 == hashlib.sha256(bin_path(prefix).read_bytes()).hexdigest()
    assert (manifest.documents, manifest.sequences, manifest.dtype) == (4, 4, "int32")
    assert manifest.tokens == sum(len(tokenizer.encode(text)) for text in TEXTS) + 3
    assert manifest.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert manifest.tokenizer_fingerprint == tokenizer.fingerprint
    assert (manifest.vocab_size, manifest.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)
    assert manifest.append_eod
    assert manifest.corpus_sha256 is None


def test_what_the_files_cannot_tell_is_asked_for(tmp_path, tokenizer_folder):
    write_foreign(tmp_path / "p", load_tokenizer(tokenizer_folder))
    done = run(tmp_path / "p", "--append-eod")
    assert done.exit_code == 1
    assert "--tokenizer is missing" in done.output
    done = run(tmp_path / "p", "--tokenizer", tokenizer_folder)
    assert done.exit_code == 1
    assert "--append-eod or --no-append-eod is missing: 3 of the 3 documents" in done.output
    assert repr(EOD) in done.output
    assert not sidecar_path(tmp_path / "p").exists()


def test_a_wrong_answer_is_refused(tmp_path, tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    write_foreign(tmp_path / "p", tokenizer, end=False)
    done = run(tmp_path / "p", "--tokenizer", tokenizer_folder, "--append-eod")
    assert done.exit_code == 1
    assert "document 0 does not end with" in done.output
    assert "(0 of 3 do)" in done.output
    done = run(tmp_path / "p", "--tokenizer", tokenizer_folder, "--no-append-eod")
    assert done.exit_code == 0, done.output
    assert not TokenizedCorpus.open(sidecar_path(tmp_path / "p")).manifest.append_eod
    write_pair(tmp_path / "q", [[tokenizer.vocab_size]], np.int32)
    done = run(tmp_path / "q", "--tokenizer", tokenizer_folder, "--no-append-eod")
    assert done.exit_code == 1
    assert f"q.bin: token {tokenizer.vocab_size} at position 0" in done.output


@pytest.mark.parametrize("chunk", [1, 3, 1 << 16])
def test_ends_of_documents_are_counted(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("lib.data.pair_description._CHUNK", chunk)
    documents = [[], [1, 0], [0], [], [0, 2], [5, 0], [3], []]
    ends = document_ends(write_pair(tmp_path / "p", documents), 0)
    assert (ends.documents, ends.ended, ends.first_other) == (5, 3, 4)
    ends = document_ends(write_pair(tmp_path / "q", [[0], []]), 0)
    assert (ends.documents, ends.ended, ends.first_other) == (1, 1, None)

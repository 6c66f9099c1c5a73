"""Texts to token files: the rules, the order, and what happens when a process dies."""

import os
import random
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.children import started_processes
from lib.atomic import sha256_of
from lib.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, bin_path, idx_path
from lib.data.options import TokensOptions
from lib.data.tokenize import Corpus, tokenize_corpus
from lib.data.tokenizer import TextTokenizer, describe_tokenizer, load_tokenizer, save_tokenizer
from lib.data.tokenizer_sources import from_gpt2
from lib.data.tokens_manifest import MANIFEST_FILE, TOKENS_PREFIX, TokensManifest
from lib.errors import UserError
from tests.data.tiny_tokenizer import EOD, gpt2_files, ignore, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny(folder)
    return folder


def run(texts, tokenizer_folder, output, advance=ignore, text_bytes=0, **options):
    corpus = Corpus(texts, text_bytes, "c0ffee")
    return tokenize_corpus(corpus, tokenizer_folder, output, TokensOptions(**options), advance)


def documents_of(output):
    dataset = IndexedDataset(output / TOKENS_PREFIX)
    dataset.verify()
    return [sequence.tolist() for sequence in (dataset[i] for i in range(len(dataset)))]


def hashes(output):
    return [sha256_of(output / f"{TOKENS_PREFIX}.{end}") for end in ("bin", "idx")]


@settings(deadline=None, max_examples=40)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=12), append_eod=st.booleans())
def test_every_document_comes_back(folder, tmp_path_factory, texts, append_eod):
    kept = [text for text in texts if text]
    if not kept:
        return
    output = tmp_path_factory.mktemp("out") / "tokens"
    manifest = run(texts, folder, output, append_eod=append_eod)
    tokenizer = load_tokenizer(folder)
    end = [tokenizer.eod_id] if append_eod else []
    assert documents_of(output) == [tokenizer.encode(text) + end for text in kept]
    assert manifest.documents == manifest.sequences == len(kept)
    assert manifest.empty_documents == len(texts) - len(kept)
    assert manifest.text_bytes == sum(len(text.encode()) for text in texts)
    assert manifest.tokens == IndexedDataset(output / TOKENS_PREFIX).num_tokens


@pytest.mark.parametrize("append_eod", [True, False])
def test_empty_documents_first_and_last(folder, tmp_path, append_eod):
    """B01: counted and left out; never a crash, never a sequence of length 0."""
    manifest = run(["", "a b", " ", ""], folder, tmp_path / "t", append_eod=append_eod)
    assert manifest.empty_documents == 2
    assert manifest.documents == 2
    lengths = IndexedDataset(tmp_path / "t" / TOKENS_PREFIX).sequence_lengths
    assert lengths.min() >= 1
    assert int(lengths.sum()) * 2 == bin_path(tmp_path / "t" / TOKENS_PREFIX).stat().st_size


def test_end_of_document_is_inside_the_length(folder, tmp_path):
    """B12: documents of 3 and 4 tokens have lengths 4 and 5; the ends are at 3 and 8."""
    manifest = run(["\x01\x02\x03", "\x01\x02\x03\x04"], folder, tmp_path / "t")
    dataset = IndexedDataset(tmp_path / "t" / TOKENS_PREFIX)
    assert dataset.sequence_lengths.tolist() == [4, 5]
    assert dataset.sequence_pointers.tolist() == [0, 8]
    assert bin_path(tmp_path / "t" / TOKENS_PREFIX).stat().st_size == 9 * 2
    assert np.flatnonzero(dataset.tokens == manifest.eod_id).tolist() == [3, 8]


def test_parts_merged_are_the_whole(folder, tmp_path):
    """B12: tokenising A and B and merging is tokenising A then B."""
    first, second = ["one", "", "two words"], ["three", "four\n", ""]
    run(first, folder, tmp_path / "a")
    run(second, folder, tmp_path / "b")
    run(first + second, folder, tmp_path / "whole")
    (tmp_path / "merged").mkdir()
    with IndexedDatasetWriter(tmp_path / "merged" / TOKENS_PREFIX, np.uint16) as writer:
        for part in ("a", "b"):
            writer.add_dataset(IndexedDataset(tmp_path / part / TOKENS_PREFIX))
    assert hashes(tmp_path / "merged") == hashes(tmp_path / "whole")


def test_text_that_spells_the_end_of_document(folder, tmp_path):
    manifest = run([f"a{EOD}b", EOD], folder, tmp_path / "t")
    dataset = IndexedDataset(tmp_path / "t" / TOKENS_PREFIX)
    assert np.count_nonzero(dataset.tokens == manifest.eod_id) == 2


def test_long_documents_are_cut_and_keep_their_end(folder, tmp_path):
    texts = ["\x01\x02", "\x01\x02\x03", "\u4e16\x01\x02\x03\x04\x05"]
    manifest = run(texts, folder, tmp_path / "t", max_document_tokens=3, long_documents="cut")
    tokenizer = load_tokenizer(folder)
    expected = [[*tokenizer.encode(text)[:3], tokenizer.eod_id] for text in texts]
    assert documents_of(tmp_path / "t") == expected
    assert (manifest.cut_documents, manifest.dropped_documents) == (1, 0)
    kept = tokenizer.decode(tokenizer.encode(texts[2])[:3])
    assert manifest.text_bytes == 2 + 3 + len(kept.encode())


def test_long_documents_are_dropped(folder, tmp_path):
    texts = ["\x01\x02", "\x01\x02\x03\x04", "\x03\x02\x01"]
    manifest = run(texts, folder, tmp_path / "t", max_document_tokens=3, long_documents="drop")
    tokenizer = load_tokenizer(folder)
    expected = [[*tokenizer.encode(texts[i]), tokenizer.eod_id] for i in (0, 2)]
    assert documents_of(tmp_path / "t") == expected
    assert (manifest.cut_documents, manifest.dropped_documents) == (0, 1)
    assert manifest.text_bytes == 5


def many_texts(count=400):
    choose = random.Random(3)
    words = ["def", "return", "dog", "\u4e16\u754c", "first", "\n", "12345", "+"]
    sizes = [choose.choice([0, 1, 5, 40, 900]) for _ in range(count)]
    return [" ".join(choose.choices(words, k=size)) for size in sizes] + ["x y" * 40_000, "end"]


def test_the_same_bytes_for_any_number_of_processes(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("lib.data.tokenize._BATCH", 10_000)
    texts = many_texts()
    results = []
    for workers, text_bytes in [(None, 0), (1, 2**40), (3, 2**40)]:
        output = tmp_path / f"{workers}"
        done = []
        manifest = run(texts, folder, output, done.append, text_bytes, workers=workers)
        assert sum(done) == len(texts)
        results.append((hashes(output), manifest, (output / MANIFEST_FILE).read_bytes()))
    assert results[0] == results[1] == results[2]
    assert started_processes() == []


def test_reading_waits_for_writing(folder, tmp_path, monkeypatch):
    """However slow the processes are, only a few batches of text are in memory."""
    monkeypatch.setattr("lib.data.tokenize._BATCH", 100)
    read = written = most = 0

    def texts():
        nonlocal read, most
        for _ in range(300):
            read += 1
            most = max(most, read - written)
            yield "x" * 99

    def advance(amount):
        nonlocal written
        written += amount

    run(texts(), folder, tmp_path / "t", advance, 2**40, workers=1)
    assert written == 300
    assert most <= 6


def test_a_process_that_dies_ends_the_stage_with_its_cause(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("lib.data.tokenize._BATCH", 1000)

    def texts():
        for number in range(10_000):
            if number == 200:
                os.kill(started_processes()[0].pid, signal.SIGKILL)
            yield "some text " * 20

    with pytest.raises(UserError, match=r"killed by SIGKILL.*nothing was written"):
        run(texts(), folder, tmp_path / "t", text_bytes=2**40, workers=2)
    assert list(tmp_path.iterdir()) == []
    assert started_processes() == []


def test_an_error_in_a_process_is_the_stages_error(folder, tmp_path):
    """The tokenizer changes under a process that has not read it yet: its message arrives."""
    broken = tmp_path / "tokenizer"
    save_tokenizer(broken, load_tokenizer(folder))

    def texts():
        yield "first"
        (broken / "tokenizer.json").unlink()
        yield "second"

    with pytest.raises(UserError, match=r"tokenizer\.json: not there"):
        run(texts(), broken, tmp_path / "t", text_bytes=2**40, workers=1)
    assert not (tmp_path / "t").exists()
    assert started_processes() == []


def test_another_tokenizer_in_the_same_folder(tmp_path):
    for vocab_size in (300, 330):
        saved = save_tiny(tmp_path / "tokenizer", vocab_size)
        run(["the first dog returns"], tmp_path / "tokenizer", tmp_path / "t", append_eod=False)
        assert documents_of(tmp_path / "t") == [saved.encode("the first dog returns")]


@pytest.mark.parametrize("text_bytes", [0, 2**40])
def test_a_tokenizer_that_changes_meanwhile_is_noticed(tmp_path, text_bytes):
    save_tiny(tmp_path / "tokenizer", 300)

    def texts():
        yield "first"
        save_tiny(tmp_path / "tokenizer", 301)

    with pytest.raises(UserError, match="changed while"):
        run(texts(), tmp_path / "tokenizer", tmp_path / "t", text_bytes=text_bytes, workers=1)
    assert not (tmp_path / "t").exists()


def test_a_failing_reader_leaves_the_old_folder(folder, tmp_path):
    run(["old"], folder, tmp_path / "t")
    before = hashes(tmp_path / "t")

    def texts():
        yield "new"
        raise UserError("shard damaged")

    for text_bytes in (0, 2**40):
        with pytest.raises(UserError, match="shard damaged"):
            run(texts(), folder, tmp_path / "t", text_bytes=text_bytes, workers=1)
    assert hashes(tmp_path / "t") == before
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert started_processes() == []


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "of 0 documents"),
        (["", ""], {}, "2 are empty"),
        (["\x01\x02"], {"max_document_tokens": 1, "long_documents": "drop"}, "1 longer"),
    ],
)
def test_no_tokens_at_all_is_an_error(folder, tmp_path, texts, options, message):
    with pytest.raises(UserError, match=rf"no tokens: .*{message}"):
        run(texts, folder, tmp_path / "t", **options)
    assert list(tmp_path.iterdir()) == []


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="prepare_tokenizer"):
        run(["a"], tmp_path / "none", tmp_path / "t")


def test_large_vocabulary_is_written_as_int32(tmp_path):
    """An id over 65535 must survive; Megatron's writer changes types at 65500."""
    backend = from_gpt2(*gpt2_files())
    backend.add_tokens([f"extra{number}x" for number in range(20_000)])
    tokenizer = TextTokenizer(backend, describe_tokenizer(backend, "tokenizer_json", EOD))
    save_tokenizer(tmp_path / "tokenizer", tokenizer)
    manifest = run(["extra19999x"], tmp_path / "tokenizer", tmp_path / "t")
    assert manifest.dtype == "int32"
    assert documents_of(tmp_path / "t") == [[70_256, 50_256]]


def test_manifest_says_what_the_files_are(folder, tmp_path):
    written = run(["one", "two"], folder, tmp_path / "t", workers=2)
    loaded = TokensManifest.load(tmp_path / "t")
    assert loaded == written
    prefix = tmp_path / "t" / loaded.prefix
    assert loaded.bin_sha256 == sha256_of(bin_path(prefix))
    assert loaded.idx_sha256 == sha256_of(idx_path(prefix))
    assert loaded.tokenizer_fingerprint == load_tokenizer(folder).fingerprint
    assert (loaded.corpus_sha256, loaded.dtype, loaded.vocab_size) == ("c0ffee", "uint16", 300)
    assert loaded.options == {
        "append_eod": True,
        "max_document_tokens": None,
        "long_documents": "cut",
    }
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == [
        "corpus_text_document.bin",
        "corpus_text_document.idx",
        "manifest.json",
    ]


def test_missing_or_damaged_manifest_is_named(tmp_path):
    with pytest.raises(UserError, match=r"manifest\.json: not there"):
        TokensManifest.load(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text("{}")
    with pytest.raises(UserError, match=r"manifest\.json: damaged"):
        TokensManifest.load(tmp_path)

"""A raw corpus to token files: the rules, and what the files and their manifest say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.atomic import sha256_of
from lib.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, bin_path, idx_path
from lib.data.options import TokensOptions
from lib.data.tokenizer import TextTokenizer, describe_tokenizer, load_tokenizer, save_tokenizer
from lib.data.tokenizer_sources import from_gpt2
from lib.data.tokens_manifest import (
    MANIFEST_FILE,
    TOKENS_PREFIX,
    TokensManifest,
    raw_document_of,
    read_left_out,
)
from lib.errors import UserError
from tests.data.raw_example import file_hashes
from tests.data.tiny_tokenizer import EOD, gpt2_files, save_tiny
from tests.data.tokenizing_example import documents_of, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny(folder)
    return folder


@settings(deadline=None, max_examples=40)
@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=12),
    low=st.none() | st.integers(1, 6),
    high=st.none() | st.integers(6, 12),
    options=st.fixed_dictionaries(
        {"append_eod": st.booleans(), "long_documents": st.sampled_from(["cut", "drop"])}
    ),
)
def test_every_document_comes_back(folder, tmp_path_factory, texts, low, high, options):
    """By the rules spelt out here, and each is found again in the raw corpus."""
    tokenizer = load_tokenizer(folder)
    end = [tokenizer.eod_id] if options["append_eod"] else []
    drop = options["long_documents"] == "drop"
    kept, expected = [], []
    for number, text in enumerate(texts):
        ids = tokenizer.encode(text)
        if not ids or (low and len(ids) < low) or (high and drop and len(ids) > high):
            continue
        kept.append(number)
        expected.append(ids[: high or len(ids)] + end)
    output = tmp_path_factory.mktemp("out") / "tokens"
    options |= {"min_document_tokens": low, "max_document_tokens": high}
    if not kept:
        with pytest.raises(UserError, match="no tokens"):
            run(texts, folder, output, **options)
        return
    manifest = run(texts, folder, output, **options)
    assert documents_of(output) == expected
    assert manifest.documents == manifest.sequences == len(kept)
    assert manifest.tokens == sum(map(len, expected))
    left_out = read_left_out(output / MANIFEST_FILE)
    assert left_out.tolist() == [n for n in range(len(texts)) if n not in kept]
    assert [raw_document_of(n, left_out) for n in range(len(kept))] == kept
    counted = manifest.empty_documents + manifest.short_documents + manifest.dropped_documents
    assert counted == len(left_out)
    if not manifest.cut_documents:
        assert manifest.text_bytes == sum(len(texts[number].encode()) for number in kept)


@pytest.mark.parametrize("append_eod", [True, False])
def test_empty_documents_first_and_last(folder, tmp_path, append_eod):
    """B01: counted and left out; never a crash, never a sequence of length 0."""
    manifest = run(["", "a b", " ", ""], folder, tmp_path / "t", append_eod=append_eod)
    assert (manifest.empty_documents, manifest.documents) == (2, 2)
    prefix = tmp_path / "t" / TOKENS_PREFIX
    lengths = IndexedDataset(prefix).sequence_lengths
    assert lengths.min() >= 1
    assert int(lengths.sum()) * 2 == bin_path(prefix).stat().st_size


def test_end_of_document_is_inside_the_length(folder, tmp_path):
    """B12: documents of 3 and 4 tokens have lengths 4 and 5; the ends are at 3 and 8."""
    manifest = run(["\x01\x02\x03", "\x01\x02\x03\x04"], folder, tmp_path / "t")
    dataset = IndexedDataset(tmp_path / "t" / TOKENS_PREFIX)
    assert dataset.sequence_lengths.tolist() == [4, 5]
    assert dataset.sequence_pointers.tolist() == [0, 8]
    assert bin_path(tmp_path / "t" / TOKENS_PREFIX).stat().st_size == 9 * 2
    assert np.flatnonzero(dataset.tokens == manifest.eod_id).tolist() == [3, 8]


def test_pairs_merged_are_the_whole(folder, tmp_path):
    """B12: tokenising A and B and merging is tokenising A then B; so is Megatron's own writer."""
    first, second = ["one", "", "two words"], ["three", "four\n", ""]
    run(first, folder, tmp_path / "a")
    run(second, folder, tmp_path / "b")
    run(first + second, folder, tmp_path / "whole")
    (tmp_path / "merged").mkdir()
    with IndexedDatasetWriter(tmp_path / "merged" / TOKENS_PREFIX, np.uint16) as writer:
        for part in ("a", "b"):
            pair = IndexedDataset(tmp_path / part / TOKENS_PREFIX)
            for document in range(len(pair)):
                writer.add_document(pair[document])
    whole = file_hashes(tmp_path / "whole")
    assert file_hashes(tmp_path / "merged").items() <= whole.items()


def test_text_that_spells_the_end_of_document(folder, tmp_path):
    manifest = run([f"a{EOD}b", EOD], folder, tmp_path / "t")
    dataset = IndexedDataset(tmp_path / "t" / TOKENS_PREFIX)
    assert np.count_nonzero(dataset.tokens == manifest.eod_id) == 2


def test_text_bytes_of_a_cut_document_are_those_of_its_tokens(folder, tmp_path):
    texts = ["\x01\x02", "\u4e16\x01\x02\x03\x04\x05"]
    manifest = run(texts, folder, tmp_path / "t", max_document_tokens=3)
    tokenizer = load_tokenizer(folder)
    kept = tokenizer.decode(tokenizer.encode(texts[1])[:3])
    assert manifest.cut_documents == 1
    assert manifest.text_bytes == 2 + len(kept.encode())


def test_another_tokenizer_in_the_same_folder(tmp_path):
    for vocab_size in (300, 330):
        saved = save_tiny(tmp_path / "tokenizer", vocab_size)
        run(["the first dog returns"], tmp_path / "tokenizer", tmp_path / "t", append_eod=False)
        assert documents_of(tmp_path / "t") == [saved.encode("the first dog returns")]


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([""], {}, "1 are empty"),
        (["\x01"], {"min_document_tokens": 2}, "1 shorter"),
        (["\x01\x02"], {"max_document_tokens": 1, "long_documents": "drop"}, "1 longer"),
    ],
)
def test_no_tokens_at_all_is_an_error(folder, tmp_path, texts, options, message):
    with pytest.raises(UserError, match=rf"no tokens: .*{message}"):
        run(texts, folder, tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_a_lower_limit_above_the_upper_one_is_refused():
    with pytest.raises(ValueError, match=r"min_document_tokens = 5: is above max_document_tokens"):
        TokensOptions(min_document_tokens=5, max_document_tokens=4)


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
    loaded = TokensManifest.load(tmp_path / "t" / MANIFEST_FILE)
    assert loaded == written
    (prefix,) = loaded.prefixes(tmp_path / "t" / MANIFEST_FILE)
    assert loaded.parts[0].bin_sha256 == loaded.tokens_sha256 == sha256_of(bin_path(prefix))
    assert loaded.parts[0].idx_sha256 == sha256_of(idx_path(prefix))
    assert loaded.tokenizer_fingerprint == load_tokenizer(folder).fingerprint
    assert (loaded.dtype, loaded.vocab_size) == ("uint16", 300)
    assert loaded.options == {
        "append_eod": True,
        "min_document_tokens": None,
        "max_document_tokens": None,
        "long_documents": "cut",
    }
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        "corpus_text_document.bin",
        "corpus_text_document.idx",
        "left_out.npy",
        "manifest.json",
    ]

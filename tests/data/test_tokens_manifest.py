"""The manifest of a tokenised corpus."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.data.tokens_manifest import (
    TokensManifest,
    TokensPart,
    raw_document_of,
    read_left_out,
)
from lib.errors import UserError


def manifest_of(*names):
    parts = tuple(
        TokensPart(prefix=name, documents=1, tokens=2, bin_sha256=f"{name}1", idx_sha256="2")
        for name in names
    )
    return TokensManifest(
        parts=parts,
        dtype="uint16",
        documents=len(names),
        sequences=len(names),
        tokens=2 * len(names),
        text_bytes=9,
        append_eod=True,
        vocab_size=300,
        eod_id=0,
        tokenizer_fingerprint="f",
        corpus_sha256=None,
    )


def test_what_is_written_is_read(tmp_path):
    manifest = manifest_of("a", "/b/c")
    manifest.write(tmp_path / "PREFIX.manifest.json")
    assert TokensManifest.load(tmp_path / "PREFIX.manifest.json") == manifest
    found = manifest.prefixes(tmp_path / "PREFIX.manifest.json")
    assert [str(path) for path in found] == [f"{tmp_path}/a", "/b/c"]


def test_one_checksum_for_all_tokens():
    assert manifest_of("a").tokens_sha256 == "a1"
    expected = hashlib.sha256(b"a1\nb1\n").hexdigest()
    assert manifest_of("a", "b").tokens_sha256 == expected


def test_differences_are_named():
    manifest = manifest_of("a")
    same = {"tokens_sha256": "a1", "tokenizer_fingerprint": "f", "vocab_size": 300}
    assert manifest.differences(**same) == []
    assert manifest.differences(**same | {"vocab_size": 301}) == ["vocabulary 300 instead of 301"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not there"),
        (b"{}", r"damaged or of another version \(parts: Field required\)"),
        (b"\xff", "no text"),
        (b'{"format": 1}', "Input should be 2"),
        (b"[", "damaged"),
    ],
)
def test_a_manifest_that_is_none_is_named(tmp_path, content, message):
    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"manifest\.json: .*{message}.*tokenize_corpus") as caught:
        TokensManifest.load(path)
    assert "\n" not in str(caught.value)


@given(kept=st.lists(st.booleans(), max_size=30))
def test_each_document_is_found_in_the_raw_corpus(kept):
    left_out = np.flatnonzero(~np.array(kept, dtype=bool))
    expected = [number for number, there in enumerate(kept) if there]
    assert [raw_document_of(n, left_out) for n in range(len(expected))] == expected


@pytest.mark.parametrize("content", [None, b"", b"no numpy file"])
def test_numbers_of_documents_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / "left_out.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"left_out\.npy: cannot be read"):
        read_left_out(tmp_path / "manifest.json")

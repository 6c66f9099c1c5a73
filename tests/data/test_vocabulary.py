"""Tokens read as plain JSON, against the tokenizers library."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel

from lib.data.vocabulary import common_beginning, tokens_by_id
from lib.errors import UserError
from tests.data.tiny_tokenizer import train

KINDS = {
    "trained": train().backend,
    "bpe": Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])),
    "unigram": Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0)),
    "words": Tokenizer(WordLevel({"<unk>": 0, "word": 5}, "<unk>")),
}


@pytest.mark.parametrize("backend", KINDS.values(), ids=KINDS)
def test_each_id_has_its_token(tmp_path, backend):
    backend.add_tokens([AddedToken("added", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    expected = {number: token for token, number in backend.get_vocab().items()}
    assert tokens_by_id(tmp_path / "tokenizer.json") == expected


def write(path, **vocab):
    path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return path


def test_a_beginning_is_common_only_if_every_id_agrees(tmp_path):
    theirs = write(tmp_path / "theirs", a=0, b=1, c=3)
    for vocab, same in (
        ({"a": 0, "b": 1, "c": 3}, True),
        ({"a": 0, "b": 1, "c": 3, "d": 4}, True),
        ({"a": 0, "b": 1, "d": 2, "c": 3}, False),
        ({"a": 0, "c": 1, "b": 3}, False),
        ({"a": 0, "b": 1}, False),
    ):
        ours = write(tmp_path / "ours", **vocab)
        assert common_beginning(theirs, ours, 4) == (4 if same else 0), vocab
    assert common_beginning(theirs, write(tmp_path / "ours", a=0, b=1), 2) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {"vocab": 3}, "added_tokens": []}'])
def test_what_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        tokens_by_id(tmp_path / "tokenizer.json")

"""Long texts in pieces: the ids of the whole, time by the size, memory for the ids alone (B08)."""

import json
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lib.data import long_texts
from lib.data.long_texts import PIECE, LongTexts, MarkedTexts
from lib.data.sentencepiece_model import to_tokenizer
from lib.data.split_pattern import MARKED_WORDS, spelt_out, split_pattern_of
from lib.data.tokenizer import TextTokenizer, describe_tokenizer
from tests.data.byte_level_tokenizers import MAKERS, bpe, with_eod
from tests.data.tiny_tokenizer import EOD, sentencepiece_model

tokenizer_of = cache(lambda kind: MAKERS[kind]())


def whole(tokenizer, text):
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


LONG = (
    st.text(alphabet="ab \n\t\r.,'sl1\u00e9\u4e16\u3002\u00a0\u2028\x1c\x85", max_size=60)
    | st.text(alphabet="aB \n'.", max_size=60)
    | st.text()
    | st.builds(lambda text, times: text * times, st.text(max_size=3), st.integers(1, 30))
)


@pytest.mark.parametrize("kind", MAKERS)
@settings(deadline=None, max_examples=60)
@given(text=LONG, piece=st.integers(1, 6))
@example(text="it's we'll 's'll 'sss don't\n\n  x  \n y", piece=3)
@example(text="!!!!!!\n\n\n    \n   x\n", piece=2)
@example(text=f"a{EOD}{EOD} b", piece=2)
@example(text="11 \n\xa01", piece=3)
@example(text="!\n!\n!\n  \n\xa0 x", piece=2)
def test_pieces_give_the_ids_of_the_whole(kind, text, piece):
    tokenizer = tokenizer_of(kind)
    expected = whole(tokenizer, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lib.data.tokenizer.PIECE", piece)
        patch.setattr(long_texts, "PIECE", piece)
        patch.setattr(long_texts, "_CHUNK", 5)
        patch.setattr(long_texts, "_UNSURE", 2)
        assert tokenizer.encode(text) == expected


@pytest.mark.parametrize("prefix", [True, False])
@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet="ab  \u2581\n\u4e16", max_size=40), piece=st.integers(1, 6))
@example(text="  a", piece=1)
@example(text="a </s> b", piece=2)
def test_pieces_of_sentencepiece_texts_give_the_ids_of_the_whole(prefix, text, piece):
    merged = {"\u2581a": -1.0, "ab": -2.0, "\u2581\u2581": -3.0, "\u2581\u2581\u2581": -4.0}
    model = sentencepiece_model("ab\u2581", merged, add_dummy_prefix=prefix)
    backend = to_tokenizer(model, "m")
    tokenizer = TextTokenizer(backend, describe_tokenizer(backend, "sentencepiece", "</s>"))
    expected = whole(tokenizer, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lib.data.tokenizer.PIECE", piece)
        patch.setattr(long_texts, "PIECE", piece)
        assert tokenizer.encode(text) == expected


MERGES = [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "a"), ("aa", "aa"), ("c", "c"), ("ab", "ab")]


@settings(deadline=None, max_examples=200)
@given(
    word=st.text(alphabet="abc", min_size=20, max_size=80),
    merges=st.permutations(MERGES),
    ignore_merges=st.booleans(),
    chunk=st.integers(1, 9),
    unsure=st.integers(1, 3),
)
def test_a_word_in_chunks_gives_its_own_ids(word, merges, ignore_merges, chunk, unsure):
    """Whether tiktoken could do the same or not."""
    merges = sorted(merges, key=lambda merge: len("".join(merge)) > 2)  # parts first
    tokenizer = with_eod(bpe(merges, ignore_merges=ignore_merges))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lib.data.tokenizer.PIECE", 8)
        patch.setattr(long_texts, "PIECE", 8)
        patch.setattr(long_texts, "_CHUNK", chunk)
        patch.setattr(long_texts, "_UNSURE", unsure)
        assert tokenizer.encode(word) == whole(tokenizer, word)


def long_text(kind, size):
    choose = random.Random(1)
    return "".join(choose.choices(LETTERS[kind], k=size))


LETTERS = {
    "words": "etaoins  ",
    "no spaces": "etaoinshrdlu",
    "one character": "=",
    "spaces": " ",
    "lines": "\n\n ",
    "digits": "0123456789",
    "no word ends in sight": "\u4e16\u754c\u300c",
}


KINDS = [
    "words",
    "no spaces",
    "one character",
    "spaces",
    "lines",
    "digits",
    "no word ends in sight",
]


class Watched:
    """A model that notes how much it was given."""

    def __init__(self, model, given):
        self.model = model
        self.given = given
        self.id_to_token = model.id_to_token

    def tokenize(self, text):
        self.given.append(len(text))
        return self.model.tokenize(text)


@pytest.mark.parametrize("kind", LETTERS)
def test_work_grows_with_the_size_and_no_part_is_large(kind):
    """B08: neither the square of the size in time, nor memory for all tokens' details."""
    tokenizer = tokenizer_of("ours")
    split = spelt_out(split_pattern_of(json.loads(tokenizer.backend.to_str())))
    given = []

    def short(text):
        given.append(len(text))
        return next(tokenizer.encode_many([text]))

    text = long_text(kind, 3 * PIECE + 100)
    ids = LongTexts(split, Watched(tokenizer.backend.model, given), short).encode(text)
    assert tokenizer.decode(ids) == text
    assert max(given) <= 2 * PIECE
    assert sum(given) < 1.5 * len(text.encode())


def test_pieces_of_sentencepiece_texts_are_small():
    backend = to_tokenizer(sentencepiece_model("ab\u2581", {}, add_dummy_prefix=True), "m")
    texts = MarkedTexts(backend, "\u2581")
    text = "ab  " * PIECE
    given = []
    pieces = LongTexts(MARKED_WORDS, None, lambda piece: given.append(len(piece)) or np.zeros(1))
    pieces.encode("\u2581" + text.replace(" ", "\u2581"))
    assert sum(given) == len(text) + 1
    assert max(given) < PIECE + 10
    assert texts.encode(text).tolist() == backend.encode(text, add_special_tokens=False).ids

"""Where tiktoken encodes, it gives the ids of the tokenizers library, whatever the text."""

import json
import sysconfig
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from lib.data.byte_alphabet import in_byte_alphabet
from lib.data.split_pattern import GPT2_PATTERN, spelt_out
from lib.data.tiktoken_encoding import TiktokenEncoding, merge_ranks
from lib.data.tokenizer import load_tokenizer, save_tokenizer
from lib.errors import UserError
from tests.data.byte_level_tokenizers import GPT4O, LLAMA3, MAKERS, bpe, split_by, with_eod
from tests.data.tiny_tokenizer import EOD

tokenizer_of = cache(lambda kind: MAKERS[kind]())
SPACES = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u180e\u2003\u200b\u2028\u2029\u3000"
ODD = "aZ\u017f\u0130\u01c5 '\u2019stmdSLrev1\u0662\u00bd\u216b.,/<|>_-\u00e9e\u0301\u4e16\u3002"
ODD += "\uac00\U0001f468\u200d\ufe0f\ufeff\u0000\u0378\U00010d4a\U0003134a\U000e0001\U0010ffff\n\r"
ANY_TEXT = (
    st.text()
    | st.text(alphabet=ODD + SPACES)
    | st.text(alphabet="a \n\r\t.1'")
    | st.lists(st.sampled_from([EOD, " ", "'ll", "'S", "12345", "\n\n", "<|", "the", "==="])).map(
        "".join
    )
)


def library_ids(tokenizer, text):
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", MAKERS)
@settings(deadline=None, max_examples=150)
@given(text=ANY_TEXT)
@example(text="It's WE'LL 'Sam x'\u017f \u017f'S\n\n  def f():\r\n\t\treturn  1234567\n   ")
@example(text="   \n \n  x \n")
@example(text=f"a{EOD}b <|never allowed|> {EOD}")
def test_the_ids_of_the_library_on_any_text(kind, text):
    tokenizer = tokenizer_of(kind)
    assert tokenizer.library == "tiktoken"
    ids = tokenizer.encode(text)
    assert ids == library_ids(tokenizer, text)
    assert not set(ids) & set(tokenizer.info.special_tokens.values())
    assert tokenizer.decode(ids) == text


def test_the_ids_of_the_library_on_real_files():
    tokenizer = tokenizer_of("gpt2")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    expected = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
    assert [ids.tolist() for ids in tokenizer.encode_many(texts)] == [one.ids for one in expected]


def pairs_of_bytes(pattern):
    """A tokenizer with a token for each two bytes: where a word ends shows in the ids."""
    letters = in_byte_alphabet(bytes(range(256)))
    return with_eod(split_by(bpe([(a, b) for a in letters for b in letters]), pattern))


def test_every_character_is_of_the_same_class():
    """The engines know different versions of Unicode; tiktoken must cut as the library does."""
    tokenizer = pairs_of_bytes(GPT4O)
    assert tokenizer.library == "tiktoken"
    codes = [*range(0x3400), *range(0xA000, 0xAC00, 3), *range(0xFB00, 0xFE00, 3)]
    codes += [*range(0x10000, 0x20000, 5), *range(0x3400, 0xA000, 97)]
    codes += [*range(0x20000, 0x110000, 97)]
    texts = ["".join(f"a{c}A{c}1{c} {c}" for c in map(chr, codes[k::32])) for k in range(32)]
    expected = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
    assert [ids.tolist() for ids in tokenizer.encode_many(texts)] == [one.ids for one in expected]


@settings(deadline=None, max_examples=150)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    shuffled=st.randoms(use_true_random=False),
    ignore_merges=st.booleans(),
    texts=st.lists(st.text(alphabet="abc", max_size=30), min_size=1, max_size=20),
)
def test_merges_of_any_kind(pairs, shuffled, ignore_merges, texts):
    """Lists with tokens that no text gives, several ways to one token, ids in any order.

    Either the rules find that tiktoken cannot do the same, or it does.
    """
    tokens = ["a", "b", "c"]
    merges = []
    for left, right in pairs:
        merge = (tokens[left % len(tokens)], tokens[right % len(tokens)])
        if merge not in merges:
            merges.append(merge)
            tokens = list(dict.fromkeys([*tokens, "".join(merge)]))
    made = tokens[3:]
    if shuffled.random() < 0.5:
        shuffled.shuffle(merges)
    ids = dict(zip(made, range(256, 256 + len(made)), strict=True))
    backend = bpe(merges, ids, ignore_merges=ignore_merges)
    ranks = merge_ranks(json.loads(backend.to_str()))
    assume(ranks is not None)
    encoding = TiktokenEncoding(ranks, spelt_out(GPT2_PATTERN))  # not compared on a sample
    texts = [*texts, *made]
    expected = backend.encode_batch_fast(texts, add_special_tokens=False)
    assert [encoding.encode(text).tolist() for text in texts] == [one.ids for one in expected]


IN_ORDER = [("b", "c"), ("a", "b"), ("ab", "c")]
FOUR = [("b", "c"), ("a", "b"), ("c", "d"), ("ab", "cd")]


def test_tokens_that_merges_cannot_make_are_left_to_the_look_for_whole_words():
    """Alone, abc is a bc, and abcd is a bc d."""
    assert with_eod(bpe(IN_ORDER)).library == "tiktoken"
    content = json.loads(bpe(IN_ORDER, ignore_merges=True).to_str())
    assert merge_ranks(content) is None  # or a b c within a longer word would become abc
    for ignore_merges in (False, True):
        tokenizer = with_eod(bpe(FOUR, ignore_merges=ignore_merges))
        assert tokenizer.library == "tiktoken"
        for text in ("abcd", " abcd", "abcdabcd", "abcd\nabcd"):
            assert tokenizer.encode(text) == library_ids(tokenizer, text)


def _with_added(backend):
    backend.add_tokens([AddedToken("two words", normalized=False)])
    return backend


def _with_normalizer(backend):
    backend.normalizer = normalizers.NFC()
    return backend


def _with_prefix(backend):
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def _with_digits_first(backend):
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


INEXACT = {
    "ids that do not rise": lambda: bpe([("a", "b"), ("b", "c")], {"ab": 257, "bc": 256}),
    "an added token that text gives": lambda: _with_added(bpe(IN_ORDER)),
    "a normalizer": lambda: _with_normalizer(bpe(IN_ORDER)),
    "a space before each text": lambda: _with_prefix(bpe(IN_ORDER)),
    "other steps before": lambda: _with_digits_first(bpe(IN_ORDER)),
    "an unknown pattern": lambda: split_by(bpe(IN_ORDER), r"\w+|\W"),
    "matches removed": lambda: split_by(bpe(IN_ORDER), LLAMA3, "removed"),
}


@pytest.mark.parametrize("case", INEXACT)
def test_what_tiktoken_cannot_do_stays_with_the_library(case):
    tokenizer = with_eod(INEXACT[case]())
    assert tokenizer.library == "tokenizers"
    for text in ("abc abd cab 12 two words e\u0301 \n\n x", f"ab{EOD}bc", ""):
        assert tokenizer.encode(text) == library_ids(tokenizer, text)
        assert tokenizer.eod_id not in tokenizer.encode(text)


def test_the_result_is_compared_with_the_library(monkeypatch):
    rules = merge_ranks

    def wrong_rules(content):
        ranks = rules(content)
        return ranks | {b"a": ranks[b"b"], b"b": ranks[b"a"]}

    monkeypatch.setattr("lib.data.tiktoken_encoding.merge_ranks", wrong_rules)
    tokenizer = with_eod(bpe(IN_ORDER))
    assert tokenizer.library == "tokenizers"
    assert tokenizer.encode("ab") == library_ids(tokenizer, "ab")


def test_removing_what_lies_between_matches_is_the_same_as_keeping_it():
    tokenizer = with_eod(split_by(bpe(IN_ORDER), LLAMA3, "removed", invert=True))
    assert tokenizer.library == "tiktoken"
    assert tokenizer.encode("abc 1234 \n x") == library_ids(tokenizer, "abc 1234 \n x")


def test_a_loaded_tokenizer_uses_it_too(tmp_path):
    save_tokenizer(tmp_path / "t", tokenizer_of("ours"))
    assert load_tokenizer(tmp_path / "t").library == "tiktoken"


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_tokenizer_whose_control_tokens_text_can_give_is_refused(ignore_merges):
    """By a merge, or by the look for whole words."""
    backend = bpe([("a", "b")] if not ignore_merges else FOUR, ignore_merges=ignore_merges)
    backend.add_special_tokens(["abcd" if ignore_merges else "ab"])
    with pytest.raises(UserError, match=r"special token 'ab(cd)?'.*could pass for control"):
        with_eod(backend)

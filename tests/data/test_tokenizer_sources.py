"""Tokenizers that exist already. SentencePiece models are compared with SentencePiece itself."""

import io
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from lib.data.options import TokenizerOptions
from lib.data.sentencepiece_model import (
    read_sentencepiece_model,
    to_tokenizer,
)
from lib.data.tokenizer import TextTokenizer, describe_tokenizer, token_byte_lengths
from lib.data.tokenizer_sources import from_gpt2, from_tokenizer_json, keeps_text, take_tokenizer
from lib.errors import UserError
from tests.data.tiny_tokenizer import (
    EOD,
    TRAINING_TEXT,
    gpt2_files,
    package_file,
    sentencepiece_model,
    train,
)

MISTRAL_V1 = ("mistral-common", "tokenizer.model.v1")
MISTRAL_V3 = ("mistral-common", "mistral_instruct_tokenizer_240323.model.v3")


def describe(backend, eod, kind="given"):
    return TextTokenizer(backend, describe_tokenizer(backend, kind, eod))


@pytest.fixture(scope="module")
def gpt2():
    return describe(from_gpt2(*gpt2_files()), EOD)


@pytest.fixture(scope="module")
def gpt2_lengths(gpt2):
    return token_byte_lengths(gpt2)


def test_gpt2(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.vocab_size == 50257
    assert gpt2.info.special_tokens == {EOD: 50256}
    assert gpt2.eod_id == 50256
    assert 50256 not in gpt2.encode(f"{EOD} a{EOD}")


@settings(deadline=None, max_examples=200)
@given(text=st.text() | st.text(alphabet="aeiou \n'st\u00e9\u4e16"))
@example(text=EOD)
def test_gpt2_gives_text_back_and_counts_its_bytes(gpt2, gpt2_lengths, text):
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    assert gpt2_lengths[ids].sum() == len(text.encode())


def test_gpt2_through_the_options():
    vocab, merges = gpt2_files()
    options = TokenizerOptions(kind="gpt2", vocab_file=str(vocab), merges_file=str(merges))
    assert take_tokenizer(options).encode("Hello world").ids == [15496, 995]


def test_gpt2_files_that_are_missing_or_wrong(tmp_path):
    vocab, merges = gpt2_files()
    with pytest.raises(UserError, match="nowhere"):
        from_gpt2(tmp_path / "nowhere.json", merges)
    (tmp_path / "v.json").write_text('{"a": 0}')
    with pytest.raises(UserError, match=r"v\.json"):
        from_gpt2(tmp_path / "v.json", merges)
    (tmp_path / "none.txt").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=r"v\.json: lacks 255 of the 256 bytes"):
        from_gpt2(tmp_path / "v.json", tmp_path / "none.txt")
    with pytest.raises(UserError, match=r"merges"):
        from_gpt2(vocab, vocab)


def test_missing_end_of_document_names_the_tokens_there_are(gpt2):
    with pytest.raises(UserError, match=r"'</s>'.*no such token.*'<\|endoftext\|>'"):
        describe_tokenizer(gpt2.backend, "gpt2", "</s>")
    plain = Tokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(UserError, match="special tokens are: none"):
        describe_tokenizer(plain, "tokenizer_json", EOD)


def test_ordinary_token_cannot_end_documents(gpt2):
    with pytest.raises(UserError, match="ordinary text gives this token"):
        describe_tokenizer(gpt2.backend, "gpt2", "Hello")


def write_json(path, backend, **changes):
    content = json.loads(backend.to_str())
    content.update(changes)
    path.write_text(json.dumps(content))
    return path


def test_tokenizer_json_is_taken_as_it_is(tmp_path):
    trained = train()
    trained.backend.save(str(tmp_path / "t.json"))
    taken = describe(from_tokenizer_json(tmp_path / "t.json"), EOD)
    assert taken.fingerprint == trained.fingerprint
    assert taken.encode(TRAINING_TEXT) == trained.encode(TRAINING_TEXT)


def test_tokenizer_json_neither_cuts_pads_nor_drops(tmp_path):
    backend = from_gpt2(*gpt2_files())
    plain = backend.encode(TRAINING_TEXT).ids
    backend.enable_truncation(5)
    backend.enable_padding(length=4000)
    backend.model.dropout = 0.5
    backend.save(str(tmp_path / "t.json"))
    assert describe(from_tokenizer_json(tmp_path / "t.json"), EOD).encode(TRAINING_TEXT) == plain


def test_end_of_document_that_is_an_ordinary_added_token_becomes_a_control_token(tmp_path):
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.add_tokens([AddedToken("<end>", special=False)])
    backend.save(str(tmp_path / "t.json"))
    taken = describe(from_tokenizer_json(tmp_path / "t.json"), "<end>")
    assert taken.eod_id == 2
    assert taken.info.special_tokens == {"<end>": 2}
    assert taken.encode("a<end>b") == [0, 1]


def test_other_kinds_of_tokenizer_are_taken(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[UNK]", "[END]"])
    backend.save(str(tmp_path / "t.json"))
    taken = describe(from_tokenizer_json(tmp_path / "t.json"), "[END]")
    assert taken.encode("hello world [END]")[:2] == [1, 2]
    assert taken.eod_id not in taken.encode("hello [END]")
    assert token_byte_lengths(taken).tolist() == [0, 5, 5, 0]
    assert not keeps_text(taken.backend)


def test_ids_with_a_hole(tmp_path):
    backend = Tokenizer(models.BPE({"a": 0, "b": 7}, []))
    backend.add_special_tokens(["<end>"])
    taken = describe(backend, "<end>")
    assert taken.vocab_size == max(backend.get_vocab().values()) + 1
    assert token_byte_lengths(taken)[:8].tolist()[0::7] == [1, 1]


def test_whether_text_is_kept():
    assert keeps_text(train().backend)
    lower = train().backend
    lower.normalizer = normalizers.Lowercase()
    assert not keeps_text(lower)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b'{"model": 1}'])
def test_wrong_tokenizer_json_is_named(tmp_path, content):
    path = tmp_path / "wrong.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"wrong\.json"):
        take_tokenizer(TokenizerOptions(kind="tokenizer_json", path=str(path)))


def pair(path: Path, eod="</s>"):
    """Our tokenizer and SentencePiece's own, from one file."""
    ours = describe(take_tokenizer(TokenizerOptions(kind="sentencepiece", path=str(path))), eod)
    return ours, sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.fixture(scope="module", params=[MISTRAL_V1, MISTRAL_V3], ids=["v1", "v3"])
def mistral(request):
    return pair(package_file(*request.param))


def test_sentencepiece_known_ids():
    ours, _ = pair(package_file(*MISTRAL_V1))
    assert ours.encode("Hello world") == [22557, 1526]
    assert (ours.vocab_size, ours.eod_id) == (32000, 2)
    assert ours.info.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_as_sentencepiece_on_ordinary_text(mistral):
    ours, theirs = mistral
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ["typing.py", "argparse.py", "statistics.py", "turtle.py", "this.py", "locale.py"]
    lines = [line for name in names for line in (folder / name).read_text().splitlines()]
    lines += [
        "\u5409\u8f29\u306f\u732b\u3067\u3042\u308b\u3002 \uac00\ub098\ub2e4 \u0414\u043e\u043c",
        "\U0001f600\U0001f468\u200d\U0001f469 na\u00efve \ufb01 e\u0301",
        "-" * 300,
        " " * 300,
        "===== ==== === == =",
    ]
    texts = ["\n".join(lines), *lines]
    expected = theirs.encode(texts)
    found = [ids.tolist() for ids in ours.encode_many(texts)]
    assert [t for t, a, b in zip(texts, found, expected, strict=True) if a != b] == []
    assert ours.decode(found[0]) == texts[0]


ODD = "ab \u2581 \n\t<>/s0x[]INSTREF_\u00e9\u4e16\U0001f600\u00a0"


@settings(deadline=None, max_examples=400)
@given(text=st.text() | st.text(alphabet=ODD) | st.text(alphabet="the aeinos.-= \n"))
@example(text="</s> <s> <unk> <0x0A> [INST]")
@example(text=" leading")
@example(text="a\ufeff\r\nb  c   ")
def test_as_sentencepiece_on_any_text(mistral, text):
    ours, theirs = mistral
    assume("REFERENCE_DOC" not in text)  # user-defined in v3: SentencePiece joins it, we never do
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert not set(ids) & set(ours.info.special_tokens.values())


@pytest.fixture(scope="module")
def mistral_lengths(mistral):
    return token_byte_lengths(mistral[0])


@settings(deadline=None, max_examples=200)
@given(text=st.text(min_size=1) | st.text(alphabet=ODD, min_size=1))
def test_sentencepiece_byte_lengths(mistral, mistral_lengths, text):
    ours, _ = mistral
    assume("\u2581" not in text)  # the mark that stands for a space
    ids = ours.encode(text)
    assert mistral_lengths[ids].sum() == len(text.encode()) + 1
    assert ours.decode(ids) == text


def test_bracketed_user_defined_pieces_are_control_tokens(mistral):
    ours, theirs = mistral
    if theirs.vocab_size() == 32000:
        assert "[REFERENCE_DOC_3]" not in ours.info.special_tokens
        return
    number = ours.info.special_tokens["[REFERENCE_DOC_3]"]
    assert number not in ours.encode("see [REFERENCE_DOC_3]")


def train_sentencepiece(path, **changes):
    options = {
        "model_type": "bpe",
        "vocab_size": 340,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "num_threads": 1,
        "minloglevel": 2,
    } | changes
    model = io.BytesIO()
    lines = [*TRAINING_TEXT.splitlines(), "aaaa bbbb  aaaa bbbb", "a b a b a b a b"] * 5
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **options
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"add_dummy_prefix": False},
        {"split_by_whitespace": False},
        {"split_by_whitespace": False, "add_dummy_prefix": False, "vocab_size": 380},
    ],
    ids=["plain", "no prefix", "across spaces", "both"],
)
def small_model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("sp") / "small.model"
    return pair(train_sentencepiece(path, **request.param))


@settings(deadline=None, max_examples=300)
@given(text=st.text(alphabet="ab the dog first second+\n\u00fc\u4e16") | st.text())
def test_small_models_as_sentencepiece(small_model, text):
    ours, theirs = small_model
    assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unigram", "vocab_size": 310}, "unigram model, not bpe"),
        ({"model_type": "char", "vocab_size": 310}, "char model, not bpe"),
        ({"byte_fallback": False, "vocab_size": 80}, "no byte fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalization of its own"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"user_defined_symbols": ["dog"]}, "user-defined pieces"),
    ],
)
def test_models_that_cannot_be_exact_are_refused(tmp_path, changes, message):
    path = train_sentencepiece(tmp_path / "odd.model", **changes)
    with pytest.raises(UserError, match=rf"odd\.model: .*{message}"):
        take_tokenizer(TokenizerOptions(kind="sentencepiece", path=str(path)))


def test_merges_follow_scores_not_ids():
    merged = {"ab": -2.0, "bc": -1.0}
    model = sentencepiece_model("abc\u2581", merged, add_dummy_prefix=False)
    assert to_tokenizer(model, "m").encode("abc").tokens == ["a", "bc"]


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x0a\xff\x01", b"\x0f", bytes(50)])
def test_wrong_model_file_is_named(tmp_path, content):
    path = tmp_path / "wrong.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"wrong\.model"):
        read_sentencepiece_model(path)


def test_a_cut_model_is_refused(tmp_path):
    data = package_file(*MISTRAL_V1).read_bytes()
    (tmp_path / "cut.model").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"cut\.model"):
        to_tokenizer(read_sentencepiece_model(tmp_path / "cut.model"), str(tmp_path / "cut.model"))


def test_only_the_control_token_has_no_bytes(gpt2_lengths):
    assert np.flatnonzero(gpt2_lengths == 0).tolist() == [50256]
    assert gpt2_lengths.size == 50257
